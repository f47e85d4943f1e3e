//! Encodings of keys and values, which are bytes, in arguments and in output.

use std::fmt::Write;

use anyhow::{Context, anyhow};
use data_encoding::{BASE64, DecodeKind, HEXLOWER, HEXLOWER_PERMISSIVE};
use farside_config::command_line::is_unprintable;
use serde::Serialize;

/// An encoding of bytes as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Encoding {
    /// The bytes themselves; escaped in output that has lines
    Raw,
    /// Two hexadecimal digits for each byte
    Hex,
    /// Base64 with padding
    Base64,
}

impl Encoding {
    /// Decodes a text.
    ///
    /// # Errors
    /// The reason why the text is not in this encoding.
    pub fn decode(self, text: &[u8]) -> anyhow::Result<Vec<u8>> {
        match self {
            Self::Raw => Ok(text.to_vec()),
            Self::Hex => decode_hex(text),
            Self::Base64 => {
                let bytes = BASE64.decode(text).context("is not base64")?;
                // The crate also decodes several padded texts in a row.
                let is_single = BASE64.encode(&bytes).as_bytes() == text;
                if is_single {
                    Ok(bytes)
                } else {
                    Err(anyhow!("is not base64: there is text after the padding"))
                }
            }
        }
    }

    /// Encodes bytes so that they fit on one line, without a tab.
    pub fn encode_line(self, bytes: &[u8]) -> String {
        match self {
            Self::Raw => escape(bytes),
            Self::Hex => HEXLOWER.encode(bytes),
            Self::Base64 => BASE64.encode(bytes),
        }
    }

    /// Encodes bytes that are the whole output: raw bytes stay unchanged, encoded bytes become a
    /// line.
    pub fn encode_whole(self, bytes: &[u8]) -> Vec<u8> {
        match self {
            Self::Raw => bytes.to_vec(),
            Self::Hex | Self::Base64 => {
                let mut line = self.encode_line(bytes).into_bytes();
                line.push(b'\n');
                line
            }
        }
    }
}

fn decode_hex(text: &[u8]) -> anyhow::Result<Vec<u8>> {
    HEXLOWER_PERMISSIVE.decode(text).map_err(|error| match error.kind {
        DecodeKind::Length => anyhow!("has an odd number of hexadecimal digits"),
        _ => anyhow!("is not hexadecimal"),
    })
}

/// Escapes bytes so that they stay on one line and cannot control a terminal. Text stays readable.
pub fn escape(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '\t' => text.push_str("\\t"),
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\\' => text.push_str("\\\\"),
                unprintable if is_unprintable(unprintable) => {
                    escape_each(unprintable.encode_utf8(&mut [0; 4]).as_bytes(), &mut text);
                }
                printable => text.push(printable),
            }
        }
        escape_each(chunk.invalid(), &mut text);
    }
    text
}

fn escape_each(bytes: &[u8], text: &mut String) {
    for byte in bytes {
        // Writing to a String cannot fail.
        let _ = write!(text, "\\x{byte:02x}");
    }
}

/// Escapes the unprintable characters of a text.
fn escaped(text: &str, escape: impl Fn(char, &mut String)) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        if is_unprintable(character) {
            escape(character, &mut safe);
        } else {
            safe.push(character);
        }
    }
    safe
}

/// Escapes the characters of a text that could control a terminal.
pub fn printable(text: &str) -> String {
    let escape = |character: char, safe: &mut String| {
        escape_each(character.encode_utf8(&mut [0; 4]).as_bytes(), safe);
    };
    escaped(text, escape)
}

/// Serializes to JSON, with the characters that could control a terminal escaped.
///
/// # Errors
/// If the value cannot be serialized.
pub fn to_json(value: &impl Serialize) -> serde_json::Result<String> {
    let escape = |character: char, safe: &mut String| {
        for unit in character.encode_utf16(&mut [0; 2]) {
            // Writing to a String cannot fail.
            let _ = write!(safe, "\\u{unit:04x}");
        }
    };
    Ok(escaped(&serde_json::to_string(value)?, escape))
}

/// The longest key that a message has in full, in characters.
const BRIEF_CHARS_MAX: usize = 100;

/// Escapes bytes as [`escape`] does, and shortens them for a message.
pub fn brief(bytes: &[u8]) -> String {
    let whole = escape(bytes);
    match whole.char_indices().nth(BRIEF_CHARS_MAX) {
        Some((end, _)) => format!("{}... ({} bytes)", &whole[..end], bytes.len()),
        None => whole,
    }
}

#[cfg(test)]
mod tests {
    use farside_config::command_line::one_line;

    use super::*;

    #[test]
    fn every_byte_round_trips_in_every_encoding() {
        let all: Vec<u8> = (0..=255).collect();
        for encoding in [Encoding::Hex, Encoding::Base64] {
            let line = encoding.encode_line(&all);
            assert!(!line.contains(['\n', '\t']));
            assert_eq!(encoding.decode(line.as_bytes()).unwrap(), all);
        }
        assert_eq!(Encoding::Raw.decode(&all).unwrap(), all);
        assert_eq!(Encoding::Raw.encode_whole(&all), all);
        assert_eq!(Encoding::Hex.encode_whole(b"\x0a\xff"), b"0aff\n");
        assert_eq!(Encoding::Hex.decode(b"0AfF").unwrap(), b"\x0a\xff");
    }

    #[test]
    fn malformed_hex_and_base64_are_refused() {
        let error = |encoding: Encoding, text: &str| {
            one_line(encoding.decode(text.as_bytes()).unwrap_err().as_ref())
        };
        assert_eq!(error(Encoding::Hex, "abc"), "has an odd number of hexadecimal digits");
        assert_eq!(error(Encoding::Hex, "zz"), "is not hexadecimal");
        assert_eq!(error(Encoding::Hex, "+1"), "is not hexadecimal");
        assert!(error(Encoding::Base64, "a").starts_with("is not base64"));
    }

    #[test]
    fn escaped_bytes_are_printable_and_text_stays_text() {
        assert_eq!(escape("gr\u{fc}n \u{1f980}".as_bytes()), "gr\u{fc}n \u{1f980}");
        assert_eq!(escape(b"a\tb\nc\rd\\e\x00\x1b[31m"), "a\\tb\\nc\\rd\\\\e\\x00\\x1b[31m");
        assert_eq!(escape(b"\xff\xfeok\xc3"), "\\xff\\xfeok\\xc3");
        assert_eq!(escape("\u{85}\u{2028}\u{202e}".as_bytes()).matches("\\x").count(), 8);
        let all: Vec<u8> = (0..=255).collect();
        assert!(escape(&all).chars().all(|character| !character.is_control()));
    }

    #[test]
    fn nothing_printed_can_control_a_terminal() {
        let text = "a\u{9b}b\u{202e}c\x1b\u{e0001}\u{61c}";
        assert_eq!(printable("caf\u{e9} C:\\ \x1b[31m"), "caf\u{e9} C:\\ \\x1b[31m");
        let json = to_json(&text).unwrap();
        for safe in [printable(text), escape(text.as_bytes()), brief(text.as_bytes()), json.clone()]
        {
            assert!(!safe.contains(is_unprintable), "{safe:?}");
        }
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
    }

    #[test]
    fn a_huge_key_is_shortened_in_messages() {
        let shown = brief(&[b'k'; 70_000]);
        assert!(shown.len() < 130 && shown.ends_with("kkk... (70000 bytes)"), "{shown}");
        assert_eq!(brief(b"short\n"), "short\\n");
    }
}
