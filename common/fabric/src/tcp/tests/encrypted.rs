//! The same over TLS, and what client and server want of each other.

use std::fs;
use std::io::IoSlice;
use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

use super::super::executors::INPUT_WORDS;
use super::super::session::{Session, Tools};
use super::super::stream::Stream;
use super::*;
use crate::memory::Executor;
use crate::rdma::ConnectionId;

/// A CA, and a folder for its files.
struct Ca {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: tempfile::TempDir,
}

impl Ca {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut params = CertificateParams::new([]).unwrap();
        let name = folder.path().to_str().unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        fs::write(folder.path().join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The file of the CA alone.
    fn trusting(&self) -> TlsFiles {
        TlsFiles { ca: Some(self.path("ca.pem")), ..Default::default() }
    }

    /// The files of a certificate for this name.
    fn issue(&self, name: &str) -> TlsFiles {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let (certificate_path, key_path) = (self.path("certificate.pem"), self.path("key.pem"));
        fs::write(&certificate_path, certificate.pem()).unwrap();
        fs::write(&key_path, key.serialize_pem()).unwrap();
        TlsFiles { certificate: Some(certificate_path), key: Some(key_path), ca: None }
    }

    /// A server with a certificate of this CA, and a client that trusts the CA.
    fn server(&self, threads: usize) -> Server {
        let tls = TlsServer::load(self.issue("127.0.0.1")).unwrap();
        let mut server = encrypted_server(threads, Arc::new(tls));
        server.tls = Some(client(&self.trusting()));
        server
    }
}

fn encrypted_server(threads: usize, tls: Arc<TlsServer>) -> Server {
    Server::start_with(Some(tls), move |listener, _| listener.start_executors(threads, OPTIONS))
}

fn client(files: &TlsFiles) -> TlsClient {
    TlsClient::load(files, "127.0.0.1").unwrap()
}

fn failure(server: &Server, tls: Option<&TlsClient>) -> TlsError {
    let error = connect_control(server.address, tls, &READER, TIMEOUT).err().unwrap();
    TlsError::of(&error).unwrap_or_else(|| panic!("{error:?}"))
}

#[test]
fn all_verbs_have_their_effects() {
    let server = Ca::new().server(1);
    check_all_verbs(&server);
    direct::check_chains(&server);
}

#[test]
fn chains_of_all_lengths_in_flight_together() {
    check_all_lengths(&Ca::new().server(2));
}

/// The thread that answers clients takes no part in handshakes: here it does nothing at all.
#[test]
fn handshakes_take_none_of_the_thread_that_answers_clients() {
    let ca = Ca::new();
    let mut listener = Listener::over(vec![TcpListener::bind("127.0.0.1:0").unwrap()]).unwrap();
    listener.require_tls(Arc::new(TlsServer::load(ca.issue("127.0.0.1")).unwrap()));
    let address = SocketAddr::from(([127, 0, 0, 1], listener.port()));
    let mut arrivals = listener.start().unwrap();
    let tls = client(&ca.trusting());
    let connect = || Stream::connect(address, Some(&tls), TIMEOUT).unwrap();
    // More than wait to be taken.
    let mut connections: Vec<_> = (0..100).map(|_| connect()).collect();
    for stream in &mut connections {
        stream.send(&[IoSlice::new(b"\x05\0\0\0hello")]).unwrap();
        assert!(stream.flush().unwrap());
    }
    let started = Instant::now();
    while arrivals.waiting() < 64 {
        assert!(started.elapsed() < TIMEOUT, "{} wait", arrivals.waiting());
        std::thread::yield_now();
    }

    let mut taken = 0;
    while taken < connections.len() {
        match arrivals.next_event().unwrap() {
            Some(Event::Request(incoming)) => {
                assert_eq!(incoming.request(), b"hello");
                taken += 1;
            }
            _ => assert!(started.elapsed() < TIMEOUT, "{taken} were taken"),
        }
    }
}

/// A session that waits for nothing keeps no memory for encrypted bytes either.
#[test]
fn an_idle_session_keeps_no_memory() {
    let ca = Ca::new();
    let tls = TlsServer::load(ca.issue("127.0.0.1")).unwrap();
    let memory = RegionMemory::anonymous(REGION_BYTES, HugePages::Never).unwrap();
    memory.region.store(LEASE.offset, LEASE.number).unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let tls_client = client(&ca.trusting());
    const LONG: u32 = 4 << 20;
    let far = std::thread::spawn(move || {
        let mut stream = Stream::connect(address, Some(&tls_client), TIMEOUT).unwrap();
        let mut request = Vec::new();
        let chain = [read(0, LONG), read(0, 8)];
        super::super::record::encode_request(LANE, &chain, Nanos::MAX, &mut request);
        stream.send(&[IoSlice::new(zerocopy::IntoBytes::as_bytes(&*request))]).unwrap();
        assert!(stream.flush().unwrap());
        // A clock record, a header, and the content.
        let (mut left, mut part) = (3 * 8 + LONG as usize + 8, vec![0; 100_000]);
        while left > 0 {
            left -= stream.receive(&mut part, true).unwrap();
        }
        stream
    });
    let mut near = Stream::over(listener.accept().unwrap().0.into()).unwrap();
    near.expect_tls(&tls).unwrap();
    let executor = Executor::new(memory.region.clone(), Some(LEASE));
    let mut session = Session::new(ConnectionId(1), near, executor);
    let (mut buffer, mut tools) = (vec![0; INPUT_WORDS], Tools::default());
    let mut most = 0;
    while !far.is_finished() {
        assert!(session.take_turn(&mut buffer, &mut tools).is_ok());
        most = most.max(session.kept_bytes());
    }
    let _far = far.join().unwrap();
    assert!(most < 1 << 20, "{most}");
    assert_eq!(session.kept_bytes(), 0);
}

#[test]
fn bytes_that_are_no_tls_end_their_own_connection_only() {
    let server = Ca::new().server(1);
    let mut fabric = server.session(1);
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.write_all(&[0x5a; 400]).unwrap();
    // Perhaps an alert, and the end.
    let _ = stream.read_to_end(&mut Vec::new());
    assert_eq!(fabric.run(LANE, REGION, &[read(4096, 64)], Nanos::MAX), Ok(0));
}

#[test]
fn a_client_and_a_server_that_disagree_say_how() {
    let (ca, other) = (Ca::new(), Ca::new());
    let server = ca.server(1);
    let error = failure(&server, Some(&client(&other.trusting())));
    assert!(matches!(&error, TlsError::Server(why) if why.contains("tls.ca")), "{error}");
    let elsewhere = TlsClient::load(&ca.trusting(), "kv.example").unwrap();
    let error = failure(&server, Some(&elsewhere));
    assert!(matches!(&error, TlsError::Server(why) if why.contains("kv.example")), "{error}");
    let error = failure(&server, None);
    assert!(error.to_string().contains("the server uses TLS"), "{error}");
    let plain = Server::start(1);
    let error = failure(&plain, Some(&client(&ca.trusting())));
    assert!(error.to_string().contains("does not use TLS"), "{error}");
}

#[test]
fn a_server_with_a_ca_wants_certificates_of_its_clients() {
    let (ca, other) = (Ca::new(), Ca::new());
    let files = TlsFiles { ca: Some(ca.path("ca.pem")), ..ca.issue("127.0.0.1") };
    let tls = Arc::new(TlsServer::load(files).unwrap());
    let mut server = encrypted_server(1, tls);
    let error = failure(&server, Some(&client(&ca.trusting())));
    assert!(matches!(&error, TlsError::Client(why) if why.contains("certificate")), "{error}");
    let stranger = TlsFiles { ca: Some(ca.path("ca.pem")), ..other.issue("client") };
    let error = failure(&server, Some(&client(&stranger)));
    assert!(matches!(error, TlsError::Client(_)), "{error}");
    let member = TlsFiles { ca: Some(ca.path("ca.pem")), ..ca.issue("client") };
    server.tls = Some(client(&member));
    check_all_verbs(&server);
}

#[test]
fn new_connections_get_the_files_that_were_read_last() {
    let (old, new) = (Ca::new(), Ca::new());
    let files = old.issue("127.0.0.1");
    let tls = Arc::new(TlsServer::load(files.clone()).unwrap());
    let mut server = encrypted_server(1, tls.clone());
    server.tls = Some(client(&old.trusting()));
    let mut fabric = server.session(1);
    let newer = new.issue("127.0.0.1");
    fs::copy(newer.certificate.unwrap(), files.certificate.unwrap()).unwrap();
    // The new certificate has another key.
    assert!(matches!(tls.reload(), Err(TlsError::File { .. })));
    drop(server.session(1));
    fs::copy(newer.key.unwrap(), files.key.unwrap()).unwrap();
    tls.reload().unwrap();
    let error = failure(&server, server.tls.as_ref());
    assert!(matches!(error, TlsError::Server(_)), "{error}");
    server.tls = Some(client(&new.trusting()));
    drop(server.session(1));
    let former = fabric.run(LANE, REGION, &[read(4096, 64)], Nanos::MAX);
    assert_eq!(former, Ok(0), "a connection that exists goes on");
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let ca = Ca::new();
    let files = ca.issue("127.0.0.1");
    let broken = ca.path("broken.pem");
    fs::write(&broken, "no certificate").unwrap();
    let named = |error: TlsError, path: &PathBuf| {
        let text = error.to_string();
        assert!(text.contains(path.to_str().unwrap()), "{text}");
    };
    let wrong = TlsFiles { certificate: Some(broken.clone()), ..files.clone() };
    named(TlsServer::load(wrong).err().unwrap(), &broken);
    let absent = ca.path("absent.pem");
    let wrong = TlsFiles { key: Some(absent.clone()), ..files.clone() };
    named(TlsServer::load(wrong).err().unwrap(), &absent);
    let wrong = TlsFiles { key: None, ..files };
    assert!(matches!(TlsServer::load(wrong), Err(TlsError::Incomplete(_))));
    let wrong = TlsFiles { ca: Some(broken.clone()), ..Default::default() };
    named(TlsClient::load(&wrong, "kv.example").err().unwrap(), &broken);
}
