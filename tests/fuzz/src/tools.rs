//! What kv-cli reads: lines of JSON, keys and values as text, keys as paths.

use std::path::Component;

use farside_config::size::ByteSize;
use farside_control::address::Address;
use farside_tools::encoding::{Encoding, escape};
use farside_tools::paths::path_of;
use farside_tools::records::{Numbered, Pair, Record, read_json_lines};

use crate::is_told_in_one_line;

const ENCODINGS: [Encoding; 3] = [Encoding::Raw, Encoding::Hex, Encoding::Base64];

/// Gathers records, and looks at the errors.
struct Gathered {
    pairs: Vec<Pair>,
    refused: u64,
    line: u64,
}

impl Gathered {
    fn new() -> Self {
        Self { pairs: Vec::new(), refused: 0, line: 0 }
    }

    fn take(&mut self, numbered: Numbered) {
        assert!(numbered.line >= self.line, "{} behind {}", numbered.line, self.line);
        self.line = numbered.line;
        match numbered.pair {
            Ok(pair) => self.pairs.push(pair),
            Err(error) => {
                is_told_in_one_line(error.as_ref());
                self.refused += 1;
            }
        }
    }

    /// That all of it comes back from lines of JSON, and whether nothing was refused.
    fn holds(self) -> bool {
        let lines: String =
            self.pairs.iter().map(|(key, value)| Record::new(key, value).to_line()).collect();
        assert_eq!(lines.lines().count(), self.pairs.len());
        let mut again = Self::new();
        read_json_lines(lines.as_bytes(), |numbered| {
            again.take(numbered);
            Ok(())
        })
        .unwrap();
        assert_eq!(again.pairs, self.pairs);
        self.refused == 0
    }
}

pub(crate) fn some_json_lines() -> Vec<Vec<u8>> {
    let all: Vec<u8> = (0..=255).collect();
    let lines =
        [Record::new(b"key", b"two\nlines"), Record::new(&all, b""), Record::new(b"", &all)];
    let lines: Vec<_> = lines.iter().map(Record::to_line).collect();
    vec![lines[0].clone().into(), lines.concat().into(), format!("\n \n{}", lines[2]).into()]
}

/// A file of lines of JSON.
pub(crate) fn json_lines(bytes: &[u8]) -> bool {
    let mut gathered = Gathered::new();
    let read = read_json_lines(bytes, |numbered| {
        gathered.take(numbered);
        Ok(())
    });
    read.unwrap();
    gathered.holds()
}

pub(crate) fn texts() -> Vec<Vec<u8>> {
    ["6b6579", "a2V5", "a/b/c", "shm:///run/kv.sock", "rdma://[fe80::1]:7400", "64MiB", "\u{202e}x"]
        .map(|text| text.as_bytes().to_vec())
        .into()
}

/// A text as each of the things that people write in arguments and files: bytes, a path, an
/// address, a size. Always accepted as one of them: any bytes are raw.
pub(crate) fn text(bytes: &[u8]) -> bool {
    for encoding in ENCODINGS {
        let line = encoding.encode_line(bytes);
        assert!(!line.contains(char::is_control), "{line:?}");
        match encoding.decode(bytes) {
            Ok(decoded) => {
                let whole = encoding.encode_whole(&decoded);
                let line = whole.strip_suffix(b"\n").filter(|_| encoding != Encoding::Raw);
                let again = line.unwrap_or(&whole);
                let is_hex = encoding == Encoding::Hex;
                let same = again == bytes || is_hex && again.eq_ignore_ascii_case(bytes);
                assert!(same, "{encoding:?}: {}", bytes.escape_ascii());
            }
            Err(error) => is_told_in_one_line(error.as_ref()),
        }
        if encoding != Encoding::Raw {
            assert_eq!(encoding.decode(line.as_bytes()).unwrap(), bytes);
        }
    }
    path_stays_below(bytes);
    if let Ok(text) = str::from_utf8(bytes) {
        match text.parse::<Address>() {
            Ok(address) => assert_eq!(address.to_string().parse(), Ok(address)),
            Err(error) => is_told_in_one_line(&error),
        }
        match text.parse::<ByteSize>() {
            Ok(size) => assert_eq!(size.to_string().parse(), Ok(size)),
            Err(error) => is_told_in_one_line(&error),
        }
    }
    true
}

/// A key that is a path leads to a file below the folder, and to no other key's.
fn path_stays_below(key: &[u8]) {
    match path_of(key) {
        Ok(path) => {
            assert!(path.components().all(|part| matches!(part, Component::Normal(_))));
            let named: Vec<_> = path.components().map(|part| part.as_os_str().to_owned()).collect();
            assert_eq!(named.join("/".as_ref()).as_encoded_bytes(), key);
        }
        Err(error) => {
            is_told_in_one_line(error.as_ref());
            assert!(!escape(key).contains(char::is_control));
        }
    }
}
