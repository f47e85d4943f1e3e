//! Entries as lines of JSON.

use std::io::{BufRead, Read};
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use data_encoding::BASE64;
use serde::{Deserialize, Serialize};

use crate::encoding::to_json;

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

#[cfg(test)]
mod tests {
    use farside_config::command_line::one_line;

    use super::*;

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
}
