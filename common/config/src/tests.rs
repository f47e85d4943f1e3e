//! Tests that the files in `config/` and the structs agree, and that every mistake gets one line.

use super::*;

const SERVER_FILE: &str = include_str!("../../../config/server.toml");
const CLIENT_FILE: &str = include_str!("../../../config/client.toml");

/// The names of a struct's fields, from its deserializer's error for an unknown field.
fn fields<T: DeserializeOwned + fmt::Debug>() -> Vec<String> {
    let message = toml::from_str::<T>("unknown = 1").unwrap_err().message().to_owned();
    let (_, expected) = message.split_once("expected ").unwrap();
    let expected = expected.trim_start_matches("one of ").replace(" or ", ", ");
    expected.split(", ").map(|name| name.trim_matches('`').to_owned()).collect()
}

/// The file with every `#key = value` uncommented. A `#` with no space behind it marks a documented
/// default.
fn uncommented(file: &str) -> String {
    let is_default = |line: &str| line.starts_with(|c: char| c.is_ascii_lowercase());
    let line = |line: &str| match line.strip_prefix('#') {
        Some(rest) if is_default(rest) => format!("{rest}\n"),
        _ => format!("{line}\n"),
    };
    file.lines().map(line).collect()
}

#[test]
fn the_files_in_config_are_valid() {
    let server: ServerConfig = toml::from_str(SERVER_FILE).unwrap();
    server.validate().unwrap();
    let client: ClientConfig = toml::from_str(CLIENT_FILE).unwrap();
    client.validate().unwrap();
    assert_eq!(addresses_text(&server.listen), client.server.unwrap());
}

/// A verb takes effect 8.2 s late at most over RDMA, by default, and 1 s over TCP.
#[test]
fn a_fabric_on_which_verbs_come_late_needs_a_longer_grace() {
    let refused = |listen: &str, ack_timeout, grace_ms| {
        let rdma = RdmaConfig { ack_timeout, ..RdmaConfig::default() };
        let listen = vec![listen.parse().unwrap()];
        let config = ServerConfig { listen, rdma, grace_ms, ..Default::default() };
        config.check_grace().is_err()
    };
    let default = RdmaConfig::default().ack_timeout;
    let rdma = "rdma://10.9.0.1:7400";
    assert!(refused(rdma, default, 52) && !refused(rdma, default, 53));
    assert!(refused(rdma, 18, 193) && !refused(rdma, 18, 194));
    let tcp = "tcp://10.9.0.1:7400";
    assert!(refused(tcp, default, 7) && !refused(tcp, default, 8));
    assert!(!refused("shm:///run/kv.sock", default, 1));
}

#[test]
fn the_files_in_config_name_every_key() {
    let documented =
        [(SERVER_FILE, fields::<ServerConfig>()), (CLIENT_FILE, fields::<ClientConfig>())];
    for (file, names) in documented {
        assert!(names.len() > 5, "{names:?}");
        let tables = match names.contains(&"tcp".to_owned()) {
            true => [
                fields::<RdmaConfig>(),
                fields::<TcpConfig>(),
                fields::<TlsFiles>(),
                fields::<ClusterStoreConfig>(),
            ]
            .concat(),
            false => [fields::<RdmaConfig>(), fields::<TlsFiles>()].concat(),
        };
        for name in names.into_iter().chain(tables) {
            if name == "mr_slice" && file == CLIENT_FILE {
                continue;
            }
            let written = file.lines().any(|line| {
                let line = line.trim_start_matches(['#', ' ']);
                let is_key = line.strip_prefix(&name).is_some_and(|rest| rest.starts_with(" = "));
                is_key || line == format!("[{name}]")
            });
            assert!(written, "`{name}` is not documented in config/");
        }
    }
}

#[test]
fn the_documented_defaults_are_the_defaults() {
    let server: ServerConfig = toml::from_str(&uncommented(SERVER_FILE)).unwrap();
    let (listen, memory) = (server.listen.clone(), server.memory);
    let limits = (server.key_bytes_max, server.value_bytes_max);
    assert_eq!(limits, (Some(KEY_BYTES_MAX_DEFAULT), Some(VALUE_BYTES_MAX_DEFAULT)));
    let (key_bytes_max, value_bytes_max) = limits;
    let expected =
        ServerConfig { listen, memory, key_bytes_max, value_bytes_max, ..Default::default() };
    assert_eq!(server, expected);
    assert_eq!(memory, Some(MEMORY_DEFAULT));
    let client: ClientConfig = toml::from_str(&uncommented(CLIENT_FILE)).unwrap();
    let (server, connect_timeout_ms) = (client.server.clone(), client.connect_timeout_ms);
    assert_eq!(client.connect_timeout(), Some(CONNECT_TIMEOUT));
    assert_eq!(client, ClientConfig { server, connect_timeout_ms, ..Default::default() });
    for (file, defaults_min) in [(SERVER_FILE, 8), (CLIENT_FILE, 4)] {
        let added = uncommented(file).parse::<toml::Table>().unwrap().len()
            - file.parse::<toml::Table>().unwrap().len();
        assert!(added >= defaults_min, "only {added} defaults are documented");
    }
}

#[test]
fn sizes_round_trip_or_the_error_says_what_to_write() {
    for (text, bytes) in [
        ("0B", 0),
        ("17B", 17),
        ("4KiB", 4 << 10),
        ("64MiB", 64 << 20),
        ("3GiB", 3 << 30),
        ("2TiB", 2 << 40),
    ] {
        let size: ByteSize = text.parse().unwrap();
        assert_eq!((size.0, size.to_string().as_str()), (bytes, text));
    }
    assert_eq!("1 GiB".parse::<ByteSize>().unwrap(), ByteSize(1 << 30));
    // The parser of the crate `bytesize` accepts some of these.
    for text in
        ["", "1", "GiB", "1GB", "-1GiB", "+1GiB", "1.5B", "1.5GiB", "99999999999TiB", "1gib"]
    {
        let error = text.parse::<ByteSize>().unwrap_err().to_string();
        assert!(error.contains("1GiB"), "{text}: {error}");
    }
}

fn server() -> ServerConfig {
    ServerConfig { listen: vec!["shm:///tmp/kv.sock".parse().unwrap()], ..Default::default() }
}

#[test]
fn the_error_for_a_bad_value_names_the_key_and_what_to_write() {
    let mistakes = [
        (ServerConfig { listen: Vec::new(), ..server() }, "listen is missing: write for example"),
        (ServerConfig { memory: Some(ByteSize(1)), ..server() }, "memory = 2MiB: write a size"),
        (
            ServerConfig { memory: Some(ByteSize::mib(7)), ..server() },
            "memory = 7MiB: write a multiple of 2MiB, such as 8MiB",
        ),
        (ServerConfig { memory: Some(ByteSize(u64::MAX)), ..server() }, "memory = "),
        (ServerConfig { grace_ms: 0, ..server() }, "grace_ms = 0: write a number from 1 to"),
        (ServerConfig { key_bytes_max: Some(65_536), ..server() }, "key_bytes_max = 65536: write"),
        (
            ServerConfig { value_bytes_max: Some((256 << 20) + 1), ..server() },
            "value_bytes_max = 268435457: write a number from 0 to 268435456",
        ),
        (ServerConfig { clients_max: 0, ..server() }, "clients_max = 0: write a number from 1"),
        (ServerConfig { clients_max: 1024, ..server() }, "clients_max = 1024: write a number"),
        (ServerConfig { secret: Some(Secret("".into())), ..server() }, "secret = \"\": write"),
        (
            ServerConfig { reader_secret: Some(Secret("r".into())), ..server() },
            "reader_secret = ...: it needs `secret`",
        ),
    ];
    server().validate().unwrap();
    for (config, expected) in mistakes {
        let error = config.validate().unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }
    let client = ClientConfig { pipeline_depth: 0, ..Default::default() };
    let error = client.validate().unwrap_err().to_string();
    assert_eq!(error, "pipeline_depth = 0: write a number from 1 to 1024");
    let client = ClientConfig { server: Some("kv.sock".into()), ..Default::default() };
    assert!(client.validate().unwrap_err().to_string().contains("shm:///run/farside/kv.sock"));
}

#[test]
fn only_a_server_cuts_its_region_into_slices_and_only_into_whole_chunks() {
    let rdma = |mr_slice| RdmaConfig { mr_slice: Some(ByteSize(mr_slice)), ..Default::default() };
    for mr_slice in [8 << 20, 10 << 20, 4 << 30, 1 << 40] {
        ServerConfig { rdma: rdma(mr_slice), ..server() }.validate().unwrap();
    }
    for (mr_slice, value) in
        [(0, "0B"), (6 << 20, "6MiB"), (9 << 20, "9MiB"), ((4 << 30) + 1, "4294967297B")]
    {
        let server = ServerConfig { rdma: rdma(mr_slice), ..server() };
        let advice = "write a multiple of 2MiB, at least 8MiB, such as 4GiB";
        let expected = format!("rdma.mr_slice = {value}: {advice}");
        assert_eq!(server.validate().unwrap_err().to_string(), expected);
    }
    let client = ClientConfig { rdma: rdma(4 << 30), ..Default::default() };
    let error = client.validate().unwrap_err().to_string();
    assert_eq!(error, "rdma.mr_slice = 4GiB: it is for the config file of a server; leave it out");
}

#[test]
fn the_error_for_a_server_of_a_cluster_names_the_key_and_what_to_write() {
    let in_cluster = || {
        let listen = vec!["tcp://127.0.0.1:7400".parse().unwrap()];
        let cluster = Some("file:///run/records".to_owned());
        ServerConfig { listen, cluster, label: Some("rack1".into()), ..Default::default() }
    };
    in_cluster().validate().unwrap();
    let listen_at = |address: &str| vec![address.parse().unwrap()];
    let store = ClusterStoreConfig { user: Some("farside".into()), ..Default::default() };
    for (config, expected) in [
        (ServerConfig { listen: listen_at("tcp://0.0.0.0:7400"), ..in_cluster() }, "listen = tcp"),
        (ServerConfig { listen: listen_at("tcp://[::]:7400"), ..in_cluster() }, "listen = tcp"),
        (ServerConfig { label: Some(String::new()), ..in_cluster() }, "label = \"\": write 1 to"),
        (ServerConfig { restore: Some("old".into()), ..in_cluster() }, "restore = old: a"),
        (ServerConfig { cluster: None, ..in_cluster() }, "label = rack1: it is for a server of"),
        (ServerConfig { cluster_store: store, ..server() }, "cluster_store = ...: it is for"),
    ] {
        let error = config.validate().unwrap_err().to_string();
        assert!(error.starts_with(expected) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn addresses_with_one_executor_of_atomic_verbs_are_served_together() {
    const RDMA: &str = "rdma://10.9.0.1:7400";
    const TCP: &str = "tcp://10.9.0.1:7400";
    const SHM: &str = "shm:///run/kv.sock";
    let validate = |listen: &[&str]| {
        let listen = listen.iter().map(|address| address.parse().unwrap()).collect();
        ServerConfig { listen, ..Default::default() }.validate()
    };
    for together in [&[RDMA, TCP][..], &[TCP, RDMA, TCP], &[SHM, TCP], &[RDMA]] {
        validate(together).unwrap();
    }
    for refused in [&[RDMA, SHM][..], &[RDMA, RDMA], &[TCP, SHM, RDMA]] {
        assert!(validate(refused).unwrap_err().to_string().starts_with("listen = "));
    }
}

#[test]
fn the_error_for_a_mistake_in_a_file_names_file_and_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server.toml");
    for (line, expected) in [
        ("colour = 1", "unknown field `colour`"),
        ("memory = \"1GB\"", "`1GB` is no size; write"),
        ("memory = 5", "invalid type"),
        ("listen = \"kv.sock\"", "write for example shm:///"),
        ("huge_pages = \"yes\"", "unknown variant `yes`, expected one of `auto`"),
        ("log_format = 'xml'", "unknown variant `xml`, expected `human` or `json`"),
        ("metrics = ':9400'", "`:9400` is no address for metrics; write an IP address and a port"),
        ("metrics = 9400", "invalid type"),
        ("grace_ms = -1", "-1"),
        ("= 7", ""),
    ] {
        fs::write(&path, format!("# one\n\n{line}\n")).unwrap();
        let error = ServerConfig::load(&path).unwrap_err().to_string();
        assert!(error.contains("server.toml:3: "), "{error}");
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    }
    let absent = ServerConfig::load(&folder.path().join("no.toml")).unwrap_err().to_string();
    assert!(absent.contains("no.toml") && absent.contains("No such file"), "{absent}");
}

#[test]
fn secrets_are_not_shown() {
    let config: ServerConfig = toml::from_str("secret = 'hush'").unwrap();
    assert_eq!(config.secret, Some(Secret("hush".into())));
    assert!(!format!("{config:?}").contains("hush"));
    let client: ClientConfig = toml::from_str("secret = 'hush'\nrole = 'reader'").unwrap();
    assert!(!format!("{client:?}").contains("hush"));
    assert_eq!(client.role, Role::Reader);
}

/// The error for a line with a secret does not repeat the secret, whatever is wrong with the line.
#[test]
fn a_secret_that_is_no_text_is_not_quoted() {
    for key in ["secret", "reader_secret"] {
        for line in [
            "KEY = 5551234",
            "KEY = 5551234555123455512345551234",
            "KEY = 5551234.25",
            "KEY = 5551234-01-01",
            "KEY = 0x5551234",
            "KEY = [5551234]",
            "KEY = { a = 5551234 }",
            "KEY = \"5551234",
            "KEY = '5551234",
            "KEY = a5551234",
            "KEY = 5551234a",
            "KEY = \"5551234\\q\"",
            "KEY: 5551234=",
            "KEY = \"5551234\" 5551234",
        ] {
            let text = line.replace("KEY", key);
            let error = parse::<ServerConfig>(&text, Path::new("server.toml")).unwrap_err();
            let error = error.to_string();
            assert!(error.contains("server.toml:1: "), "{error}");
            assert!(!error.contains("555") && !error.contains('\n'), "{text}: {error}");
        }
    }
    let error = parse::<ClientConfig>("secret = 5551234", Path::new("client.toml")).unwrap_err();
    assert_eq!(error.to_string(), "client.toml:1: secret: write it in quotes, as a text");
}
