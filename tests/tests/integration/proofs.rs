//! Proves that what a client or a server has sent makes no other connection a client, or a session
//! of a client, and that a client proves nothing to an imposter.
//!
//! Guards against a hello that shows what the server compares with. A program that reads it once,
//! on the network or at a false address, could send it again.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use farside::{Client, ConnectError, Session, SetupError};
use farside_control::address::Address;
use farside_control::{
    Challenge, ConnectRequest, DataAccepted, FabricKind, Proof, ProofMessage, Purpose, Refusal,
    Role, SecretKey, Welcome,
};
use farside_tests::handshake::{self, RawClient};
use farside_tests::{ServerProcess, TEST_TIMEOUT, free_tcp_address};

const CONFIG: &str = "secret = 'writers'\nreader_secret = 'readers'\n";
/// The length of a message's length, over TCP.
const LENGTH_BYTES: usize = 4;

/// Returns a server at a socket and at a port, and the port's address.
fn server_at_port() -> (ServerProcess, SocketAddr) {
    let tcp = free_tcp_address();
    let options = format!("--memory 16MiB --listen {tcp}");
    let server = ServerProcess::start_with_config(CONFIG, &options);
    (server, tcp.parse::<Address>().unwrap().resolve(TEST_TIMEOUT).unwrap()[0])
}

fn writer(address: SocketAddr) -> Result<Client, SetupError> {
    Client::builder().server(&format!("tcp://{address}")).secret("writers").connect()
}

/// Forwards connections, and records what clients send on each.
struct Eavesdropper {
    address: SocketAddr,
    recorded: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Eavesdropper {
    fn before(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let recorded = Arc::<Mutex<Vec<Vec<u8>>>>::default();
        let records = recorded.clone();
        // The threads end with the connections, or with this process.
        std::thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                let server = TcpStream::connect(server).unwrap();
                let number = {
                    let mut records = records.lock().unwrap();
                    records.push(Vec::new());
                    records.len() - 1
                };
                let (back, records) =
                    ((server.try_clone().unwrap(), client.try_clone().unwrap()), records.clone());
                std::thread::spawn(move || forward(back.0, back.1, |_| {}));
                std::thread::spawn(move || {
                    forward(client, server, |bytes| {
                        records.lock().unwrap()[number].extend_from_slice(bytes);
                    });
                });
            }
        });
        Self { address, recorded }
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream, record: impl Fn(&[u8])) {
    let mut buffer = [0; 4096];
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        record(&buffer[..bytes]);
        if to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

/// Returns the messages at the beginning of a recorded connection, each with its length before it.
fn messages(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut messages = Vec::new();
    while let Some(length) = bytes.first_chunk::<LENGTH_BYTES>() {
        let end = LENGTH_BYTES + u32::from_le_bytes(*length) as usize;
        let Some((message, rest)) = bytes.split_at_checked(end) else { break };
        messages.push(message);
        bytes = rest;
    }
    messages
}

fn check_served(session: &mut Session) {
    session.put("key", "value").unwrap();
    assert_eq!(*session.get("key").unwrap().unwrap(), *b"value");
}

#[on(shm)]
fn a_recorded_connection_makes_neither_a_client_nor_a_session() {
    let (server, address) = server_at_port();
    let eavesdropper = Eavesdropper::before(address);
    let client = writer(eavesdropper.address).unwrap();
    let mut session = client.session().unwrap();
    check_served(&mut session);
    let recorded = eavesdropper.recorded.lock().unwrap().clone();
    let purpose = |bytes: &[u8]| {
        let hello = messages(bytes)[0];
        ConnectRequest::decode(&hello[LENGTH_BYTES..]).unwrap().purpose
    };
    let mut replayed = (0, 0);
    for bytes in &recorded {
        let mut stream = TcpStream::connect(address).unwrap();
        match purpose(bytes) {
            Purpose::Data { .. } => {
                stream.write_all(bytes).unwrap();
                let answer = handshake::receive(&mut stream).unwrap();
                let refusal = DataAccepted::decode(&answer).unwrap().err();
                assert!(matches!(refusal, Some(Refusal::OldNonce { .. })), "{refusal:?}");
                replayed.1 += 1;
            }
            // The client also asks whether there is a cluster.
            _ => {
                let [hello, proof, ..] = messages(bytes)[..] else { panic!("no proof") };
                stream.write_all(&[hello, proof].concat()).unwrap();
                let challenge = handshake::receive(&mut stream).unwrap();
                assert!(Challenge::decode(&challenge).unwrap().is_ok());
                let answer = handshake::receive(&mut stream).unwrap();
                assert_eq!(Welcome::decode(&answer), Ok(Err(Refusal::Credentials)));
                replayed.0 += 1;
            }
        }
        assert_eq!(handshake::receive(&mut stream), None, "the server closes it");
    }
    assert!(replayed.0 > 0 && replayed.1 > 0, "{replayed:?}");
    check_served(&mut session);
    let statistics = client.admin().statistics().unwrap();
    assert_eq!((statistics.clients, statistics.clients_lost), (1, 0));
    drop(server);
}

/// The key of a session follows from the nonces of its client's own connection.
#[on(shm)]
fn a_client_cannot_open_sessions_of_another_with_the_same_secret() {
    let (_server, address) = server_at_port();
    let connect = || RawClient::connect(address, Role::Reader, &SecretKey::of("readers")).unwrap();
    let (victim, thief) = (connect(), connect());
    let client_id = victim.welcome.client_id;
    let mut stolen = thief.data_hello();
    let Purpose::Data { client_id: own, .. } = &mut stolen.purpose else { unreachable!() };
    *own = client_id;
    let mut stream = TcpStream::connect(address).unwrap();
    handshake::send(&mut stream, &stolen.encode());
    let answer = handshake::receive(&mut stream).unwrap();
    let refusal = DataAccepted::decode(&answer).unwrap().err();
    assert!(matches!(refusal, Some(Refusal::OldNonce { .. })), "{refusal:?}");
    assert!(victim.session().is_ok() && thief.session().is_ok());
}

/// A false server that answers one client with this challenge, and a welcome. Returns what the
/// client sent, and its error.
fn deceive(challenge: impl FnOnce(&[u8]) -> Vec<u8> + Send) -> ([Vec<u8>; 2], String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    let mut options =
        farside_tests::engine::connect_options(&address, Role::Writer, SecretKey::of("writers"));
    options.timeout = TEST_TIMEOUT;
    std::thread::scope(|scope| {
        let client = scope.spawn(|| options.attach(options.timeout).err());
        let (mut stream, _) = listener.accept().unwrap();
        let hello = handshake::receive(&mut stream).unwrap();
        handshake::send(&mut stream, &challenge(&hello));
        let proof = handshake::receive(&mut stream).unwrap();
        let welcome = Welcome::for_map(farside_control::cluster::Id([1; 16]), 0, 1);
        handshake::send(&mut stream, &welcome.encode());
        let error = client.join().unwrap().expect("a connection to an imposter");
        assert!(matches!(error, ConnectError::Unproven { .. }), "{error:?}");
        ([hello, proof], error.to_string())
    })
}

#[on(shm)]
fn an_imposter_gets_no_proof() {
    let (_server, address) = server_at_port();
    // An imposter that makes up its proofs, one that knows the readers' secret only, and one that
    // repeats the server's answer to an earlier hello.
    let with = |secret: &str| {
        let key = SecretKey::of(secret);
        move |hello: &[u8]| handshake::challenge(hello, FabricKind::Tcp, &key).1
    };
    let earlier = {
        let mut stream = TcpStream::connect(address).unwrap();
        let hello = handshake::hello(Role::Writer, Purpose::Control);
        handshake::send(&mut stream, &hello.encode());
        handshake::receive(&mut stream).unwrap()
    };
    let deceived =
        [deceive(with("a guess")), deceive(with("readers")), deceive(|_| earlier.clone())];
    for ([hello, proof], error) in deceived {
        assert!(error.contains("does not prove that it knows this client's secret"), "{error}");
        assert_eq!(ProofMessage::decode(&proof), Ok(ProofMessage(Proof::NONE)));
        // What the client sent is of no use at the server.
        let mut stream = TcpStream::connect(address).unwrap();
        handshake::send(&mut stream, &hello);
        assert!(Challenge::decode(&handshake::receive(&mut stream).unwrap()).unwrap().is_ok());
        handshake::send(&mut stream, &proof);
        let answer = handshake::receive(&mut stream).unwrap();
        assert_eq!(Welcome::decode(&answer), Ok(Err(Refusal::Credentials)));
    }
}

/// Over each fabric.
#[on(each, rdma_in_soak)]
fn both_sides_have_the_same_secret_or_none() {
    for (config, secret, says) in [
        ("", None, None),
        (CONFIG, Some("writers"), None),
        ("", Some("writers"), Some("this client has a secret, but the server has none")),
        (CONFIG, None, Some("wrong secret for this role")),
        (CONFIG, Some("readers"), Some("wrong secret for this role")),
        (CONFIG, Some("others"), Some("wrong secret for this role")),
    ] {
        let server = ServerProcess::start_with_config(config, "--memory 16MiB");
        let builder = server.client_builder();
        let builder = match secret {
            Some(secret) => builder.secret(secret),
            None => builder,
        };
        match (builder.connect(), says) {
            (Ok(client), None) => check_served(&mut client.session().unwrap()),
            (Err(error), Some(says)) => {
                let line = farside_config::command_line::one_line(&error);
                assert!(line.contains(says) && line.contains(&server.address()), "{line}");
            }
            (Ok(_), Some(says)) => panic!("connected, but {says}"),
            (Err(error), None) => panic!("{error}"),
        }
    }
}

/// The server replaces its nonce after 1024 sessions, or 5 seconds.
#[on(shm)]
fn a_session_opens_although_the_server_has_replaced_its_nonce() {
    let (_server, address) = server_at_port();
    let client = writer(address).unwrap();
    for _ in 0..1100 {
        drop(client.session().unwrap());
    }
    check_served(&mut client.session().unwrap());
}
