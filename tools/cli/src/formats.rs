//! The formats that kv-cli reads and writes: bytes as text, entries as lines of JSON, and keys as
//! paths below a folder.

use std::ffi::OsStr;
use std::fmt::Write;
use std::io::{BufRead, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use data_encoding::{BASE64, DecodeKind, HEXLOWER, HEXLOWER_PERMISSIVE};
use farside_config::command_line::is_unprintable;
use serde::{Deserialize, Serialize};

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

/// The longest line of JSON: enough for the largest block with each byte as `\u00XX`.
const LINE_BYTES_MAX: u64 = 32 << 20;

/// The mark with which some programs begin a UTF-8 file.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// A key and a value.
pub type Pair = (Vec<u8>, Vec<u8>);

/// A key and a value as one line of JSON: each as text if it is UTF-8, otherwise as base64.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key_base64: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    value_base64: Option<String>,
}

impl Record {
    /// Creates the record of a key and a value.
    pub fn new(key: &[u8], value: &[u8]) -> Self {
        let (key, key_base64) = text_or_base64(key);
        let (value, value_base64) = text_or_base64(value);
        Self { key, key_base64, value, value_base64 }
    }

    /// Returns the line, with its line feed.
    pub fn to_line(&self) -> String {
        // Four strings always serialize.
        let mut line = to_json(self).unwrap_or_default();
        line.push('\n');
        line
    }

    fn from_line(line: &[u8]) -> anyhow::Result<Pair> {
        let record: Self = serde_json::from_slice(line).map_err(|error| {
            // serde also names the line, which is always 1 here.
            anyhow!("{}", error.to_string().replace(" at line 1 column ", " at column "))
        })?;
        let key = bytes_of("key", record.key, record.key_base64)?;
        Ok((key, bytes_of("value", record.value, record.value_base64)?))
    }
}

fn text_or_base64(bytes: &[u8]) -> (Option<String>, Option<String>) {
    match str::from_utf8(bytes) {
        Ok(text) => (Some(text.to_owned()), None),
        Err(_) => (None, Some(BASE64.encode(bytes))),
    }
}

fn bytes_of(name: &str, text: Option<String>, base64: Option<String>) -> anyhow::Result<Vec<u8>> {
    match (text, base64) {
        (Some(text), None) => Ok(text.into_bytes()),
        (None, Some(base64)) => {
            let bytes = BASE64.decode(base64.as_bytes());
            bytes.with_context(|| format!("{name}_base64 is not base64"))
        }
        (Some(_), Some(_)) => bail!("it has both {name} and {name}_base64"),
        (None, None) => bail!("it has neither {name} nor {name}_base64"),
    }
}

/// A record with the number of its line.
pub struct NumberedRecord {
    /// The line, counted from 1.
    pub line: u64,
    /// The key and value, or the mistake in the line.
    pub pair: anyhow::Result<Pair>,
}

/// The records in lines of JSON. Skips empty lines. An error is one of reading, or a line that is
/// too long for a record; it is the last item to be taken.
pub struct JsonLines<R> {
    from: R,
    /// The number of the last line.
    line: u64,
    text: Vec<u8>,
}

impl<R: BufRead> JsonLines<R> {
    /// Reads from here.
    pub fn new(from: R) -> Self {
        Self { from, line: 0, text: Vec::new() }
    }

    fn next_record(&mut self) -> anyhow::Result<Option<NumberedRecord>> {
        let Self { from, line, text } = self;
        loop {
            *line += 1;
            text.clear();
            if from.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', text)? == 0 {
                return Ok(None);
            }
            if text.len() as u64 == LINE_BYTES_MAX && !text.ends_with(b"\n") {
                bail!("line {line} is over {LINE_BYTES_MAX} bytes long: longer than any record");
            }
            let record = match text.strip_prefix(BYTE_ORDER_MARK) {
                Some(rest) if *line == 1 => rest,
                _ => text,
            };
            if !record.trim_ascii().is_empty() {
                let pair = Record::from_line(record);
                return Ok(Some(NumberedRecord { line: *line, pair }));
            }
        }
    }
}

impl<R: BufRead> Iterator for JsonLines<R> {
    type Item = anyhow::Result<NumberedRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_record().transpose()
    }
}

/// Whether a file has lines of JSON, by its name.
pub fn has_json_lines(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "jsonl")
}

/// The longest path below a folder, in bytes: the system refuses longer paths.
pub const PATH_BYTES_MAX: usize = 4095;

/// Returns the path of a key's file, relative to the folder.
///
/// # Errors
/// If no path has the key's bytes, or if the path could lead out of the folder or to another key's
/// file.
pub fn path_of(key: &[u8]) -> anyhow::Result<&Path> {
    if key.contains(&0) {
        bail!("it has a NUL byte, which no path has");
    }
    if key.len() > PATH_BYTES_MAX {
        bail!("it has {} bytes, but a path has at most {PATH_BYTES_MAX}", key.len());
    }
    if key.starts_with(b"/") {
        bail!("it is an absolute path");
    }
    for part in key.split(|byte| *byte == b'/') {
        match part {
            b"" => bail!("it has an empty part, as in `a//b`"),
            b"." | b".." => bail!("it has a part `.` or `..`"),
            _ => {}
        }
    }
    Ok(Path::new(OsStr::from_bytes(key)))
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

    /// Returns the number of each line, with its key and value or its error.
    fn read_all(text: &[u8]) -> Vec<String> {
        let seen = JsonLines::new(text).map(|record| match record.unwrap() {
            NumberedRecord { line, pair: Ok((key, value)) } => format!("{line}:{key:?}={value:?}"),
            NumberedRecord { line, pair: Err(error) } => {
                format!("{line}:{}", one_line(error.as_ref()))
            }
        });
        seen.collect()
    }

    #[test]
    fn any_bytes_round_trip_through_a_line() {
        let all: Vec<u8> = (0..=255).collect();
        let line = Record::new("a\u{9b}".as_bytes(), "\u{202e}".as_bytes()).to_line();
        assert_eq!(line, "{\"key\":\"a\\u009b\",\"value\":\"\\u202e\"}\n");
        for (key, value) in
            [(&b"key"[..], &b"two\nlines\x00"[..]), (&all, b""), ("\u{fc}\u{9b}".as_bytes(), &all)]
        {
            let line = Record::new(key, value).to_line();
            assert_eq!(line.find('\n'), Some(line.len() - 1));
            assert_eq!(Record::from_line(line.as_bytes()).unwrap(), (key.into(), value.into()));
        }
        assert_eq!(Record::new(b"k", b"v").to_line(), "{\"key\":\"k\",\"value\":\"v\"}\n");
        let binary = Record::new(b"\xff", b"\xfe").to_line();
        assert_eq!(binary, "{\"key_base64\":\"/w==\",\"value_base64\":\"/g==\"}\n");
    }

    #[test]
    fn malformed_lines_are_reported_by_number_and_the_others_are_read() {
        let text = b"{\"key\":\"a\",\"value\":\"1\"}\n\nnonsense\n{\"key\":\"b\"}\n\
            {\"key\":\"c\",\"value\":\"1\",\"value_base64\":\"\"}\n\
            {\"key_base64\":\"!\",\"value\":\"\"}\n{\"key\":\"d\",\"value\":\"\"}";
        let seen = read_all(text);
        assert_eq!(seen.len(), 6);
        assert_eq!(seen[0], "1:[97]=[49]");
        assert!(seen[1].starts_with("3:expected ident at column 2"), "{}", seen[1]);
        assert_eq!(seen[2], "4:it has neither value nor value_base64");
        assert_eq!(seen[3], "5:it has both value and value_base64");
        assert!(seen[4].starts_with("6:key_base64 is not base64"), "{}", seen[4]);
        assert_eq!(seen[5], "7:[100]=[]");
    }

    #[test]
    fn a_byte_order_mark_before_the_first_record_is_skipped() {
        let text =
            "\u{feff}{\"key\":\"a\",\"value\":\"1\"}\n\u{feff}{\"key\":\"b\",\"value\":\"\"}\n";
        let seen = read_all(text.as_bytes());
        assert_eq!(seen[0], "1:[97]=[49]");
        assert!(seen[1].starts_with("2:expected value"), "{}", seen[1]);
    }

    #[test]
    fn the_name_of_a_file_decides_its_format() {
        assert!(has_json_lines(Path::new("a/b.jsonl")));
        assert!(!has_json_lines(Path::new("a.jsonl/b")));
    }

    #[test]
    fn keys_that_could_leave_the_folder_are_refused() {
        for key in ["a", "a/b", "...", "a/..b", ".hidden", "a b", "\u{fc}"] {
            assert_eq!(path_of(key.as_bytes()).unwrap(), Path::new(key));
        }
        assert!(path_of(b"\xff\xfe").is_ok());
        for key in
            ["", "/", "/a", "//a", "..", "../a", "a/../b", "a/..", ".", "a/./b", "a//b", "a/"]
        {
            assert!(path_of(key.as_bytes()).is_err(), "{key}");
        }
        assert!(path_of(b"a\0b").is_err());
    }
}
