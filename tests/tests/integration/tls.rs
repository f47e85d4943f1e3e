//! TLS between programs: commands and the library, whom a server lets in, and new certificates.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use farside::{Client, ConnectError, SetupError, TlsError, TlsFiles};
use farside_tests::command::{CommandOutput, command};
use farside_tests::{ServerProcess, TEST_TIMEOUT, free_tcp_address, wait_until};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustix::process::Signal;

/// A server at a socket and, encrypted, at a port; and a folder with its certificate, which signs
/// itself.
struct EncryptedServer {
    server: ServerProcess,
    tcp: String,
    folder: tempfile::TempDir,
}

/// Writes `certificate.pem` for this host, which signs itself, and `key.pem`.
pub(crate) fn write_certificate(folder: &Path) {
    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    fs::write(folder.join("certificate.pem"), cert.pem()).unwrap();
    fs::write(folder.join("key.pem"), signing_key.serialize_pem()).unwrap();
}

fn tls_table(folder: &Path, names: &[(&str, &str)]) -> String {
    let line =
        |(key, file): &(&str, &str)| format!("{key} = \"{}\"\n", folder.join(file).display());
    format!("[tls]\n{}", names.iter().map(line).collect::<String>())
}

impl EncryptedServer {
    fn start(mutual: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_certificate(folder.path());
        let tcp = free_tcp_address();
        let own = [("certificate", "certificate.pem"), ("key", "key.pem")];
        let with_ca = [&own[..], &[("ca", "certificate.pem")]].concat();
        let config = tls_table(folder.path(), if mutual { &with_ca } else { &own });
        let arguments = format!("--memory 64MiB --listen {tcp}");
        let server = ServerProcess::start_with_config(&config, &arguments);
        Self { server, tcp, folder }
    }

    fn files(&self) -> TlsFiles {
        TlsFiles { ca: Some(self.folder.path().join("certificate.pem")), ..Default::default() }
    }

    fn connect(&self, files: TlsFiles) -> Result<Client, SetupError> {
        Client::builder().server(&self.tcp).tls(files).connect()
    }

    /// A command with a config file of these keys of `[tls]`.
    fn command(&self, name: &str, keys: &[(&str, &str)]) -> Command {
        let file = self.folder.path().join("client.toml");
        let config = format!("server = \"{}\"\n{}", self.tcp, tls_table(self.folder.path(), keys));
        fs::write(&file, config).unwrap();
        let mut command = command(name);
        command.env_remove("FARSIDE_SERVER").arg("--config").arg(file);
        command
    }
}

fn tls_error(result: Result<Client, SetupError>) -> TlsError {
    match result {
        Err(SetupError::Connect(ConnectError::Tls { source, .. })) => source,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("connected"),
    }
}

// On shared memory only: it uses two fabrics itself.
#[on(shm)]
fn the_library_and_the_commands_use_an_encrypted_connection() {
    let encrypted = EncryptedServer::start(false);
    let mut session = encrypted.connect(encrypted.files()).unwrap().session().unwrap();
    let long: Vec<u8> = (0..1_000_000_u32).map(|byte| byte as u8).collect();
    session.put("long", &long).unwrap();
    for _ in 0..3 {
        assert_eq!(session.get("long").unwrap().unwrap(), long);
    }
    for number in 0..500_u32 {
        session.put(format!("key-{number}"), number.to_le_bytes()).unwrap();
    }
    // The same region, without TLS, at the socket.
    let mut beside = encrypted.server.session();
    assert_eq!(beside.get("key-77").unwrap().unwrap(), 77_u32.to_le_bytes());
    let run = |name: &str, arguments: &[&str]| {
        let mut command = encrypted.command(name, &[("ca", "certificate.pem")]);
        CommandOutput::of(command.args(arguments)).succeeded()
    };
    run("kv-cli", &["put", "a", "b"]);
    assert_eq!(run("kv-cli", &["get", "a"]).stdout, b"b");
    let health = run("kv-cli", &["doctor"]);
    assert!(health.text().contains("tcp://"), "{}", health.text());
    run("kv-cli", &["stat"]);
    run("kv-cli", &["verify"]);
    // Its `--config` comes after the subcommand.
    let config = encrypted.folder.path().join("client.toml");
    let config = config.to_str().unwrap();
    for what in [
        &["verbs", "--span", "1MiB", "--seconds", "0.1"][..],
        &[
            "ycsb",
            "--workload",
            "c",
            "--records",
            "100",
            "--seconds",
            "0.1",
            "--warmup-seconds",
            "0",
        ],
    ] {
        let mut bench = command("kv-bench");
        CommandOutput::of(bench.args(what).args(["--config", config])).succeeded();
    }
    encrypted.server.assert_verifies();
}

// On shared memory only: it uses a fabric itself.
#[on(shm)]
fn a_client_that_may_not_come_in_gets_one_line() {
    let encrypted = EncryptedServer::start(true);
    let error = tls_error(encrypted.connect(encrypted.files()));
    assert!(matches!(error, TlsError::Client(_)), "{error}");
    let error = tls_error(encrypted.connect(TlsFiles::default()));
    assert!(matches!(error, TlsError::OneSided(_)), "{error}");
    let get = |keys: &[(&str, &str)]| {
        CommandOutput::of(encrypted.command("kv-cli", keys).args(["get", "key"]))
    };
    get(&[]).expect_line(3, &[&encrypted.tcp, "the server uses TLS: set tls.ca"]);
    let ca = ("ca", "certificate.pem");
    get(&[ca]).expect_line(3, &[&encrypted.tcp, "set tls.certificate and tls.key"]);
    get(&[("ca", "absent.pem")]).expect_line(3, &["absent.pem"]);
    get(&[("certificate", "certificate.pem")]).expect_line(2, &["tls.ca is missing"]);
    get(&[ca, ("key", "key.pem")]).expect_line(2, &["tls.certificate is missing"]);
    let member = [ca, ("certificate", "certificate.pem"), ("key", "key.pem")];
    // The certificate is valid and the key absent.
    get(&member).expect(1, b"");
}

// On shared memory only: it uses a fabric itself.
#[on(shm)]
fn a_new_certificate_is_used_after_sighup() {
    let encrypted = EncryptedServer::start(false);
    let path = |name: &str| -> PathBuf { encrypted.folder.path().join(name) };
    let old = path("old.pem");
    fs::copy(path("certificate.pem"), &old).unwrap();
    let old = TlsFiles { ca: Some(old), ..Default::default() };
    let mut session = encrypted.connect(old.clone()).unwrap().session().unwrap();
    write_certificate(encrypted.folder.path());
    encrypted.server.signal(Signal::HUP);
    encrypted.server.wait_for_log("read the files of TLS again");
    let error = tls_error(encrypted.connect(old));
    assert!(matches!(error, TlsError::Server(_)), "{error}");
    encrypted.connect(encrypted.files()).unwrap();
    session.put("key", "value").unwrap();
    // A file that cannot be used changes nothing.
    let certificate = fs::read(path("certificate.pem")).unwrap();
    fs::write(path("certificate.pem"), "nothing").unwrap();
    encrypted.server.signal(Signal::HUP);
    encrypted.server.wait_for_log("the former certificate stays in use");
    fs::write(path("certificate.pem"), certificate).unwrap();
    // A pipe in the place of the key, which has no writer: the server does not wait.
    fs::rename(path("key.pem"), path("away.pem")).unwrap();
    assert!(Command::new("mkfifo").arg(path("key.pem")).status().unwrap().success());
    encrypted.server.signal(Signal::HUP);
    encrypted.server.wait_for_log("key.pem: it is no regular file; the former certificate stays");
    fs::remove_file(path("key.pem")).unwrap();
    fs::rename(path("away.pem"), path("key.pem")).unwrap();
    encrypted.server.signal(Signal::HUP);
    wait_until("it reads the files again", TEST_TIMEOUT, || {
        encrypted.server.log().matches("read the files of TLS again").count() == 2
    });
    encrypted.connect(encrypted.files()).unwrap();
}

// On shared memory only: it uses a fabric itself.
#[on(shm)]
fn a_server_with_half_a_certificate_does_not_start() {
    let folder = tempfile::tempdir().unwrap();
    write_certificate(folder.path());
    let start = |listen: &str, keys: &[(&str, &str)]| {
        let config = folder.path().join("server.toml");
        fs::write(&config, tls_table(folder.path(), keys)).unwrap();
        let mut server = command("kv-server");
        CommandOutput::of(server.arg("--config").arg(config).args(["--listen", listen]))
    };
    let (certificate, key) = (("certificate", "certificate.pem"), ("key", "key.pem"));
    let tcp = "tcp://127.0.0.1:7400";
    start(tcp, &[certificate]).expect_line(1, &["tls.key is missing"]);
    start(tcp, &[key]).expect_line(1, &["tls.certificate is missing"]);
    start(tcp, &[certificate, ("key", "certificate.pem")]).expect_line(1, &["certificate.pem"]);
    let shm = format!("shm://{}", folder.path().join("kv.sock").display());
    start(&shm, &[certificate, key]).expect_line(1, &["[tls] encrypts tcp:// alone"]);
}
