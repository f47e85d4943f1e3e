//! Targets: input of kv-cli: lines of JSON, keys and values as text, and keys as paths.

use std::path::Component;

use farside_cli::formats::path_of;
use farside_cli::formats::{Encoding, escape};
use farside_cli::formats::{JsonLines, NumberedRecord, Pair, Record};
use farside_config::size::ByteSize;
use farside_control::address::Address;

use crate::{check_error_line, decoded};

const ENCODINGS: [Encoding; 3] = [Encoding::Raw, Encoding::Hex, Encoding::Base64];

/// The records of a file, the number of refused ones, and the number of the last line.
#[derive(Default)]
struct Gathered {
    pairs: Vec<Pair>,
    refused: u64,
    line: u64,
}

impl Gathered {
    /// Reads lines of JSON, and checks the errors.
    fn from_lines(lines: &[u8]) -> Self {
        let mut gathered = Self::default();
        JsonLines::new(lines).for_each(|numbered| gathered.take(numbered.unwrap()));
        gathered
    }

    fn take(&mut self, numbered: NumberedRecord) {
        assert!(numbered.line >= self.line, "{} after {}", numbered.line, self.line);
        self.line = numbered.line;
        match numbered.pair {
            Ok(pair) => self.pairs.push(pair),
            Err(error) => {
                check_error_line(error.as_ref());
                self.refused += 1;
            }
        }
    }

    /// Checks that the records round-trip through lines of JSON. Returns whether no record was
    /// refused.
    fn all_round_trip(self) -> bool {
        let lines: String =
            self.pairs.iter().map(|(key, value)| Record::new(key, value).to_line()).collect();
        assert_eq!(lines.lines().count(), self.pairs.len());
        assert_eq!(Self::from_lines(lines.as_bytes()).pairs, self.pairs);
        self.refused == 0
    }
}

pub(crate) fn some_json_lines() -> Vec<Vec<u8>> {
    let every_byte: Vec<u8> = (0..=255).collect();
    let lines = [
        Record::new(b"key", b"two\nlines"),
        Record::new(&every_byte, b""),
        Record::new(b"", &every_byte),
    ];
    let lines: Vec<_> = lines.iter().map(Record::to_line).collect();
    vec![lines[0].clone().into(), lines.concat().into(), format!("\n \n{}", lines[2]).into()]
}

/// A file of lines of JSON.
pub(crate) fn json_lines(bytes: &[u8]) -> bool {
    Gathered::from_lines(bytes).all_round_trip()
}

pub(crate) fn texts() -> Vec<Vec<u8>> {
    ["6b6579", "a2V5", "a/b/c", "shm:///run/kv.sock", "rdma://[fe80::1]:7400", "64MiB", "\u{202e}x"]
        .map(|text| text.as_bytes().to_vec())
        .into()
}

/// A text as a user writes it in arguments and files: encoded bytes, a path, an address, a size.
/// Accepts every input, because any bytes are valid in the raw encoding.
pub(crate) fn text(bytes: &[u8]) -> bool {
    for encoding in ENCODINGS {
        let line = encoding.encode_line(bytes);
        assert!(!line.contains(char::is_control), "{line:?}");
        match encoding.decode(bytes) {
            Ok(decoded) => {
                let whole = encoding.encode_whole(&decoded);
                let line = whole.strip_suffix(b"\n").filter(|_| encoding != Encoding::Raw);
                let encoded_again = line.unwrap_or(&whole);
                let is_hex = encoding == Encoding::Hex;
                let is_same =
                    encoded_again == bytes || is_hex && encoded_again.eq_ignore_ascii_case(bytes);
                assert!(is_same, "{encoding:?}: {}", bytes.escape_ascii());
            }
            Err(error) => check_error_line(error.as_ref()),
        }
        if encoding != Encoding::Raw {
            assert_eq!(encoding.decode(line.as_bytes()).unwrap(), bytes);
        }
    }
    check_path_stays_below(bytes);
    if let Ok(text) = str::from_utf8(bytes) {
        if let Some(address) = decoded(text.parse::<Address>()) {
            assert_eq!(address.to_string().parse(), Ok(address));
        }
        if let Some(size) = decoded(text.parse::<ByteSize>()) {
            assert_eq!(size.to_string().parse(), Ok(size));
        }
    }
    true
}

/// Checks that the path of a key leads to a file in the folder, and that no other key has it.
fn check_path_stays_below(key: &[u8]) {
    match path_of(key) {
        Ok(path) => {
            assert!(path.components().all(|part| matches!(part, Component::Normal(_))));
            let named: Vec<_> = path.components().map(|part| part.as_os_str().to_owned()).collect();
            assert_eq!(named.join("/".as_ref()).as_encoded_bytes(), key);
        }
        Err(error) => {
            check_error_line(error.as_ref());
            assert!(!escape(key).contains(char::is_control));
        }
    }
}
