//! Targets: input of kv-cli, which is lines of JSON, keys and values as text, and keys as paths;
//! requests of clients of redis, as kv-resp parses them, and its patterns and numbers; the config
//! files of server and client.

use std::path::{Component, Path};

use farside_cli::formats::{Encoding, JsonLines, NumberedRecord, Pair, Record, escape, path_of};
use farside_config::size::ByteSize;
use farside_config::{ClientConfig, PIPELINE_DEPTH_RANGE, ServerConfig};
use farside_control::address::Address;
use farside_layout::CHUNK_BYTES;
use farside_resp::{
    Decimal, ParserLimits, Progress, ProtocolError, RequestParser, matches, parse_integer,
};

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

/// Limits that short inputs reach.
const LIMITS: ParserLimits = ParserLimits {
    arguments_max: 64,
    bulk_bytes_max: 256,
    kept_bytes_max: 32,
    request_bytes_max: 128,
};

pub(crate) fn some_requests() -> Vec<Vec<u8>> {
    [
        "*3\r\n$3\r\nset\r\n$1\r\nk\r\n$5\r\nvalue\r\n*1\r\n$4\r\nPING\r\n",
        "*2\r\n$3\r\nget\r\n$40\r\n0123456789012345678901234567890123456789\r\n",
        "set k \"a\\x41\\n\" 'it\\'s'\r\n\r\n*0\r\n*-1\r\nping\n",
    ]
    .map(|text| text.as_bytes().to_vec())
    .into()
}

/// The arguments of a request, and the length of the first one that was dropped.
type Parsed = (Vec<Vec<u8>>, Option<usize>);

/// Parses bytes that arrive in pieces of this size.
fn parse(bytes: &[u8], piece: usize) -> Result<Vec<Parsed>, ProtocolError> {
    let (mut parser, mut input, mut requests) = (RequestParser::new(LIMITS), Vec::new(), vec![]);
    for piece in bytes.chunks(piece) {
        input.extend_from_slice(piece);
        while !input.is_empty() {
            let Progress::Complete(end) = parser.parse(&mut input, 0, true)? else { break };
            assert!(end <= input.len() && parser.count() <= LIMITS.arguments_max.max(end));
            let arguments = (0..parser.count()).map(|at| parser.argument(&input, at).to_vec());
            requests.push((arguments.collect(), parser.too_long()));
            input.drain(..end);
            parser.reset();
        }
        assert!(input.len() <= LIMITS.request_bytes_max.max(bytes.len()));
    }
    Ok(requests)
}

/// Requests. Whether they arrive at once or in pieces makes no difference.
pub(crate) fn requests(bytes: &[u8]) -> bool {
    let whole = parse(bytes, bytes.len().max(1));
    for piece in [1, 3] {
        let in_pieces = parse(bytes, piece);
        assert_eq!(in_pieces, whole);
    }
    let (pattern, text) = bytes.split_at(bytes.len() / 2);
    matches(pattern, text);
    if let Some(number) = parse_integer(bytes) {
        assert_eq!(Decimal::of(number).bytes(), bytes);
    }
    whole.is_ok()
}

const SERVER_FILE: &str = include_str!("../../../config/server.toml");
const CLIENT_FILE: &str = include_str!("../../../config/client.toml");
const RDMA: &str = "[rdma]\nretry_count = 3\nack_timeout = 14\nspin_us = 50\n";

/// Returns the file unchanged, the file with its commented-out keys as real ones, and a file with
/// `rest` and the keys of RDMA.
fn files(file: &str, rest: &str) -> Vec<Vec<u8>> {
    let is_key = |line: &str| line.starts_with(|c: char| c.is_ascii_lowercase() || c == '[');
    let uncommented = file.lines().map(|line| line.trim_start_matches('#'));
    let keys: Vec<_> = uncommented.filter(|line| is_key(line)).collect();
    vec![file.into(), keys.join("\n").into_bytes(), format!("{rest}{RDMA}").into_bytes()]
}

pub(crate) fn servers() -> Vec<Vec<u8>> {
    let rest = "listen = 'rdma://[fe80::1]:7400'\nmemory = '64MiB'\nsecret = 'a'\n\
        reader_secret = 'b'\nhuge_pages = 'never'\nlog_format = 'json'\n\
        grace_ms = 10000\nevict = true\n";
    files(SERVER_FILE, rest)
}

pub(crate) fn clients() -> Vec<Vec<u8>> {
    let rest = "server = 'rdma://kv-1.rack:7400'\nrole = 'reader'\nsecret = 'a'\n";
    files(CLIENT_FILE, rest)
}

fn check_address_round_trips(address: &Address) {
    assert_eq!(address.to_string().parse::<Address>().unwrap(), *address);
}

fn check_size_round_trips(size: ByteSize) {
    assert_eq!(size.to_string().parse::<ByteSize>().unwrap(), size);
}

/// A server's config file.
pub(crate) fn server(bytes: &[u8]) -> bool {
    let Ok(text) = str::from_utf8(bytes) else { return false };
    let config = farside_config::parse::<ServerConfig>(text, Path::new("server.toml"));
    let config = config.and_then(|config| config.validate().map(|()| config));
    let Some(config) = decoded(config) else { return false };
    config.listen.iter().for_each(check_address_round_trips);
    [config.memory, config.index].into_iter().flatten().for_each(check_size_round_trips);
    let region_bytes = config.region_bytes();
    assert!(region_bytes.is_multiple_of(CHUNK_BYTES));
    config.format(region_bytes, [0; 16], [0; 16]).check().unwrap();
    let _ = config.rdma.options().lateness_max_ns();
    true
}

/// A client's config file.
pub(crate) fn client(bytes: &[u8]) -> bool {
    let Ok(text) = str::from_utf8(bytes) else { return false };
    let config = farside_config::parse::<ClientConfig>(text, Path::new("client.toml"));
    let config = config.and_then(|config| config.validate().map(|()| config));
    let Some(config) = decoded(config) else { return false };
    if let Some(server) = &config.server {
        Address::parse_several(server).unwrap().iter().for_each(check_address_round_trips);
    }
    check_size_round_trips(config.cache_bytes);
    assert!(PIPELINE_DEPTH_RANGE.contains(&config.pipeline_depth));
    let _ = config.rdma.options().lateness_max_ns();
    true
}
