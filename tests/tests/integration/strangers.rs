//! Proves that invalid bytes from a stranger do no harm: random, truncated, or with flipped bits.
//! They come in a connect request, in a control message, or in the answer of a false server.
//! Connected clients are still served, others get an error. Guards against a decoder that trusts
//! its input.

#[cfg(feature = "verbs")]
mod imposter;

use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use farside::Client;
use farside_control::address::Address;
use farside_control::attach::ConnectOptions;
use farside_control::{
    Challenge, DataAccepted, FabricKind, MESSAGE_BYTES_MAX, Nonce, PROTOCOL_VERSION, Proof,
    Purpose, REQUEST_BYTES_MAX, Refusal, Request, Role, SecretKey, Versions, Welcome,
};
use farside_fabric::memory::{HugePages, RegionMemory};
use farside_fabric::shm::{Connection, Listener};
use farside_fabric::tcp;
use farside_layout::SizeClass;
use farside_tests::engine::connect_options;
use farside_tests::{
    ServerProcess, TEST_TIMEOUT, as_other_user, handshake, is_over_tcp, left_out_without_root,
    new_address, scaled,
};
use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};

/// Returns random bytes, or valid ones that are truncated or have a flipped bit.
fn garbage(random: &mut SmallRng, valid: &[u8], bytes_max: usize) -> Vec<u8> {
    let mut bytes = valid.to_vec();
    match random.random_range(0..3) {
        0 => {
            bytes.resize(random.random_range(0..=bytes_max), 0);
            random.fill_bytes(&mut bytes);
        }
        1 => bytes.truncate(random.random_range(0..valid.len())),
        _ => bytes[random.random_range(0..valid.len())] ^= 1 << random.random_range(0..8),
    }
    bytes
}

/// Returns the server's refusal of these bytes as a request; `None` if it accepts them.
fn refusal_of(server: &str, bytes: &[u8], for_data: bool) -> Option<Refusal> {
    let target: Address = server.parse().unwrap();
    let reply = match target.resolve(TEST_TIMEOUT).unwrap().first() {
        None => {
            let path = server.strip_prefix("shm://").unwrap();
            let connection = Connection::connect(path.as_ref(), TEST_TIMEOUT).unwrap();
            connection.set_receive_timeout(Some(TEST_TIMEOUT)).unwrap();
            connection.send(bytes, None).unwrap();
            let mut reply = [0; 256];
            let (bytes, _) = connection.receive(&mut reply).unwrap();
            reply[..bytes].to_vec()
        }
        Some(address) if is_over_tcp() => {
            tcp::connect_control(*address, None, bytes, TEST_TIMEOUT).unwrap().1
        }
        Some(address) => answer_over_rdma(*address, bytes, for_data),
    };
    match for_data {
        true => DataAccepted::decode(&reply).unwrap().err(),
        false => Challenge::decode(&reply).unwrap().err(),
    }
}

#[cfg(feature = "verbs")]
fn answer_over_rdma(address: SocketAddr, bytes: &[u8], for_data: bool) -> Vec<u8> {
    use farside_fabric::rdma::{Options, VerbsError};
    use farside_fabric::verbs::{connect_control, connect_data};
    let options = Options::default();
    let connected = match for_data {
        true => connect_data(address, bytes, 1, &options).map(|link| link.reply().to_vec()),
        false => connect_control(address, bytes, &options).map(|(_, reply)| reply),
    };
    match connected {
        Ok(reply) => reply,
        Err(VerbsError::Rejected { reason, .. }) => reason,
        Err(error) => panic!("{error}"),
    }
}

#[cfg(not(feature = "verbs"))]
fn answer_over_rdma(_: SocketAddr, _: &[u8], _: bool) -> Vec<u8> {
    unreachable!("there is no device without RDMA")
}

fn connect_request(role: Role, purpose: Purpose) -> [u8; REQUEST_BYTES_MAX] {
    handshake::hello(role, purpose).encode()
}

fn options(address: &str, role: Role, secret_key: SecretKey) -> ConnectOptions {
    let timeout = TEST_TIMEOUT;
    ConnectOptions { timeout, ..connect_options(address, role, secret_key) }
}

/// Returns a server with a secret, and options that connect to it.
fn guarded() -> (ServerProcess, ConnectOptions) {
    let config = "secret = 'secret'\nlog_level = 'debug'\n";
    let server = ServerProcess::start_with_config(config, "--memory 16MiB");
    let options = options(&server.address(), Role::Reader, SecretKey::of("secret"));
    (server, options)
}

/// The size of the region of a false server.
const REGION_BYTES: u64 = 8 << 20;

/// Returns the welcome of a false server. It looks like that of a real server over a socket.
fn false_welcome() -> Welcome {
    Welcome {
        client_id: 3,
        lease: 1 << 32 | 7,
        region_id: [7; 16],
        incarnation: 1,
        base_address: 0,
        region_bytes: REGION_BYTES,
        round_trip_min_ns: 0,
        data_nonce: Nonce::default(),
        ..Welcome::default()
    }
}

/// Returns a client with the secret; checks that it is served.
fn legitimate_client(server: &ServerProcess) -> farside::Client {
    let client = server.client_builder().secret("secret").connect().unwrap();
    client.session().unwrap().put(b"key", b"value").unwrap();
    client
}

#[on(each, rdma)]
fn no_invalid_connect_request_harms_a_server() {
    let (server, _) = guarded();
    let client = legitimate_client(&server);
    let mut session = client.session().unwrap();
    let address = server.address();
    let mut random = SmallRng::seed_from_u64(5);
    let mut accepted = 0;
    let mut try_one = |bytes: &[u8], for_data| {
        let refusal = refusal_of(&address, bytes, for_data);
        let is_expected = |refusal| {
            matches!(
                refusal,
                Refusal::Malformed { .. }
                    | Refusal::Version { .. }
                    | Refusal::UnknownClient { .. }
                    | Refusal::OldNonce { .. }
            )
        };
        assert!(refusal.is_none_or(is_expected), "{bytes:?}: {refusal:?}");
        accepted += u64::from(refusal.is_none());
        assert_eq!(*session.get(b"key").unwrap().unwrap(), *b"value");
    };
    // Over a socket, no bytes at all are a goodbye.
    for bytes in 1..=REQUEST_BYTES_MAX {
        let mut noise = vec![0; bytes];
        random.fill_bytes(&mut noise);
        try_one(&noise, bytes % 2 == 0);
        if bytes < REQUEST_BYTES_MAX {
            try_one(&connect_request(Role::Writer, Purpose::Control)[..bytes], false);
        }
    }
    for round in 0..scaled(10_000) {
        let proof = Proof([round as u8; 16]);
        let stolen = Purpose::Data { client_id: 1, proof };
        let purpose = if round % 2 == 0 { Purpose::Control } else { stolen };
        let mut bytes =
            garbage(&mut random, &connect_request(Role::Writer, purpose), REQUEST_BYTES_MAX);
        bytes.resize(bytes.len().max(1), 0);
        try_one(&bytes, purpose != Purpose::Control);
    }
    // A client of the former version, and one of the next.
    for version in [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1] {
        let mut other = connect_request(Role::Writer, Purpose::Control);
        other[4..8].copy_from_slice([version.to_le_bytes(); 2].as_flattened());
        let client = Versions { lowest: version, highest: version };
        let versions = Refusal::Version { server: Versions::OWN, client };
        assert_eq!(refusal_of(&address, &other, false), Some(versions));
        println!("{versions}");
    }
    // A connect request with a flipped bit in the role or in the nonce is a valid one. Without a
    // proof it makes no client.
    println!("{accepted} connect requests were challenged");
    let statistics = client.admin().statistics().unwrap();
    assert!(accepted > 0 && (statistics.clients, statistics.clients_lost) == (1, 0));
    legitimate_client(&server);
}

#[on(each, rdma_in_soak)]
fn an_invalid_message_harms_only_its_sender() {
    let (server, options) = guarded();
    let client = legitimate_client(&server);
    let mut session = client.session().unwrap();
    let mut random = SmallRng::seed_from_u64(6);
    let mut valid = Vec::new();
    let mut ended = 0;
    let rounds = scaled(5_000);
    for round in 0..rounds {
        // As a reader: a writer is trusted, and a garbled message may give blocks it does not hold.
        let mut channel = options.attach(options.timeout).unwrap().channel;
        match round % 4 {
            0 => Request::Statistics.encode(&mut valid),
            1 => Request::Goodbye.encode(&mut valid),
            2 => valid = vec![0xff; MESSAGE_BYTES_MAX],
            _ => {
                let class = SizeClass::all().next().unwrap();
                Request::TakeBlocks { class, count: 7 }.encode(&mut valid);
            }
        }
        let bytes = garbage(&mut random, &valid, 512);
        if bytes.is_empty() || channel.send(&bytes).is_err() {
            continue;
        }
        // The server answers if the bytes are another valid message; otherwise it disconnects.
        let mut reply = vec![0; MESSAGE_BYTES_MAX];
        let started = Instant::now();
        loop {
            match channel.receive(&mut reply) {
                Ok(None) => std::thread::sleep(Duration::from_micros(200)),
                Ok(Some(0)) | Err(_) => break ended += 1,
                Ok(Some(_)) => break,
            }
            assert!(started.elapsed() < TEST_TIMEOUT, "no end after {bytes:?}");
        }
        assert_eq!(*session.get(b"key").unwrap().unwrap(), *b"value");
    }
    println!("{ended} of {rounds} were disconnected");
    assert!(ended > rounds / 2);
    assert!(server.log().contains("it breaks the protocol"));
    legitimate_client(&server);
}

/// A reader sees every lease in the region, and must not open sessions of another client with it.
#[on(rdma_in_soak)]
fn a_reader_cannot_open_sessions_of_another_client() {
    let (server, options) = guarded();
    let victim = options.attach(options.timeout).unwrap();
    let Welcome { client_id, lease, .. } = victim.welcome;
    let proof = Proof(zerocopy::transmute!([lease; 2]));
    let stolen = connect_request(Role::Reader, Purpose::Data { client_id, proof });
    let refusal = refusal_of(&server.address(), &stolen, true);
    assert!(matches!(refusal, Some(Refusal::OldNonce { .. })), "{refusal:?}");
    assert!(victim.factory.fabric(1).is_ok());
}

/// Over a socket the region's descriptor comes with the welcome, and may be any file.
// On shared memory only: it is about the socket.
#[on(shm)]
fn a_socket_that_answers_with_garbage_is_no_server() {
    let folder = tempfile::tempdir().unwrap();
    let address = new_address(folder.path());
    let socket = Listener::bind(&folder.path().join("kv.sock")).unwrap();
    let memory = RegionMemory::anonymous(REGION_BYTES, HugePages::Never).unwrap();
    let no_region: File = memory.reader_descriptor().unwrap();
    let valid = false_welcome().encode();
    let options = options(&address, Role::Reader, SecretKey::NONE);
    let mut random = SmallRng::seed_from_u64(11);
    let mut lines = std::collections::BTreeSet::new();
    for round in 0..2_000 {
        let reply = match round {
            0..2 => valid.clone(),
            _ => garbage(&mut random, &valid, 300),
        };
        let error = std::thread::scope(|scope| {
            let client = scope.spawn(|| options.attach(options.timeout).err());
            let connection = socket.accept().unwrap();
            let mut hello = [0; REQUEST_BYTES_MAX];
            connection.receive(&mut hello).unwrap();
            let key = &SecretKey::NONE;
            let (_, challenge, _) = handshake::challenge(&hello, FabricKind::Shm, key);
            // The garbage comes in place of the challenge, or of the welcome.
            if round % 4 != 3 {
                connection.send(&challenge, None).unwrap();
                connection.receive(&mut hello).unwrap();
            }
            let descriptor = (round % 2 == 0).then(|| no_region.as_fd());
            connection.send(&reply, descriptor).unwrap();
            drop(connection);
            client.join().unwrap().expect("a connection to an imposter")
        });
        let line = error.to_string();
        assert!(line.len() > 20 && !line.contains('\n'), "{line}");
        lines.insert(line);
    }
    assert!(lines.iter().any(|line| line.contains("not a Farside region")), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("without a descriptor")), "{lines:?}");
}

/// Without a secret, only the owner of the socket tells a client which server is the right one.
#[on(shm)]
fn a_socket_of_another_user_gets_no_hello() {
    if left_out_without_root("it takes two users") {
        return;
    }
    // All users may create files in this folder, as in /tmp.
    let folder = tempfile::tempdir().unwrap();
    let shared = folder.path().join("shared");
    std::fs::create_dir(&shared).unwrap();
    for (path, mode) in [(folder.path(), 0o755), (shared.as_path(), 0o1777)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let address = format!("shm://{}/kv.sock", shared.display());
    let socket = as_other_user(|| Listener::bind(&shared.join("kv.sock")).unwrap());
    std::thread::scope(|scope| {
        let received = scope.spawn(|| {
            let connection = socket.accept().unwrap();
            connection.receive(&mut [0; REQUEST_BYTES_MAX]).unwrap().0
        });
        let timeout = Duration::from_millis(100);
        let builder = Client::builder().server(&address).secret("secret").connect_timeout(timeout);
        let error = builder.connect().err().unwrap();
        println!("{error}");
        assert_eq!(received.join().unwrap(), 0, "the imposter got a hello");
        assert!(error.to_string().contains("is served by user 54321, which is not root"));
    });
}
