//! Targets: the config files of server and client.

use std::path::Path;

use farside_config::size::ByteSize;
use farside_config::{ClientConfig, PIPELINE_DEPTH_RANGE, ServerConfig};
use farside_control::address::Address;
use farside_layout::CHUNK_BYTES;

use crate::decoded;

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
