//! kv-resp's passwords and TLS, and clients that say nothing.

use std::fs;
use std::process::Command;

use farside_tests::command::CommandOutput;
use farside_tests::{ServerProcess, left_out};

use super::gateway::RespServer;
use crate::tls::write_certificate;

#[on(any, rdma_in_soak)]
fn a_password_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("password");
    fs::write(&file, "secret\n").unwrap();
    let server = ServerProcess::start("--memory 64MiB");
    let gateway = RespServer::gateway(&server, &["--password-file", file.to_str().unwrap()]);
    let mut client = gateway.connect();
    assert_eq!(client.say("GET a"), "-NOAUTH Authentication required.\r\n");
    assert!(client.say("HELLO 3").starts_with("-NOAUTH HELLO must be called"));
    // An error changes nothing.
    let words = ["HELLO", "3", "AUTH", "default", "secret", "SETNAME", "a b"];
    assert!(client.ask(&words).starts_with(b"-ERR Client names cannot contain"));
    assert_eq!(client.say("GET a"), "-NOAUTH Authentication required.\r\n");
    assert!(client.say("AUTH wrong!").starts_with("-WRONGPASS "));
    assert_eq!(client.say("AUTH secret"), "+OK\r\n");
    assert_eq!(client.say("GET a"), "$-1\r\n");
    assert_eq!(client.say("RESET"), "+RESET\r\n");
    assert!(client.say("GET a").starts_with("-NOAUTH "));
    assert!(client.say("HELLO 3 AUTH default secret").starts_with("%7\r\n"));
    assert_eq!(client.say("GET a"), "_\r\n");
    let mut client = gateway.connect();
    client.send(b"*11\r\n");
    assert!(client.rest().ends_with(b"unauthenticated multibulk length\r\n"));
    let mut client = gateway.connect();
    client.send(b"*2\r\n$16385\r\n");
    assert!(client.rest().ends_with(b"unauthenticated bulk length\r\n"));
}

/// A folder with a certificate and a password, and arguments of a gateway that uses both.
fn encrypted() -> (tempfile::TempDir, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    write_certificate(folder.path());
    fs::write(folder.path().join("password"), "secret").unwrap();
    let flag = |(flag, file): (&str, &str)| {
        [flag.to_owned(), folder.path().join(file).display().to_string()]
    };
    let flags = [
        ("--tls-certificate", "certificate.pem"),
        ("--tls-key", "key.pem"),
        ("--password-file", "password"),
    ];
    let arguments = flags.into_iter().flat_map(flag).collect();
    (folder, arguments)
}

#[on(any, rdma_in_soak)]
fn tls_and_a_password_together() {
    let server = ServerProcess::start("--memory 64MiB");
    let (folder, mut arguments) = encrypted();
    let certificate = folder.path().join("certificate.pem").display().to_string();
    let run = |gateway: &RespServer, arguments: &[&str]| {
        let mut program = Command::new("redis-cli");
        program.args(["--no-auth-warning", "--tls", "--cacert", &certificate]);
        program.args(["-h", "127.0.0.1", "-p", gateway.port()]).args(arguments).output().ok()
    };
    let gateway = RespServer::gateway(&server, &arguments);
    let text = |words: &[&str]| {
        let output = run(&gateway, words).map(CommandOutput::new);
        output.map(|output| output.succeeded().text().trim_end().to_owned())
    };
    let Some(refused) = text(&["get", "a"]) else {
        return left_out("without redis", "it runs redis-cli");
    };
    assert_eq!(refused, "NOAUTH Authentication required.");
    assert_eq!(text(&["-a", "secret", "set", "a", "1"]).unwrap(), "OK");
    assert_eq!(text(&["-3", "-a", "secret", "incr", "a"]).unwrap(), "2");
    assert!(text(&["-a", "wrong!", "get", "a"]).unwrap().contains("NOAUTH"));
    let value = "v".repeat(100_000);
    assert_eq!(text(&["-a", "secret", "set", "long", &value]).unwrap(), "OK");
    assert_eq!(text(&["-a", "secret", "get", "long"]).unwrap(), value);
    // Bytes that are not encrypted end the connection.
    let mut plain = gateway.connect();
    plain.send(b"PING\r\n");
    assert!(!plain.rest().starts_with(b"+PONG"));

    // With a CA, a client needs a certificate.
    arguments.extend(["--tls-ca".to_owned(), certificate.clone()]);
    let gateway = RespServer::gateway(&server, &arguments);
    let key = folder.path().join("key.pem").display().to_string();
    let own = ["--cert", &certificate, "--key", &key, "-a", "secret", "get", "a"];
    assert_eq!(CommandOutput::new(run(&gateway, &own).unwrap()).succeeded().text(), "2\n");
    let without = run(&gateway, &["-a", "secret", "get", "a"]).unwrap();
    assert!(!String::from_utf8_lossy(&without.stdout).contains('2'));
}

#[on(any, rdma_in_soak)]
fn clients_that_do_not_log_in_are_closed() {
    let server = ServerProcess::start("--memory 64MiB");
    let (_folder, arguments) = encrypted();
    let encrypted = RespServer::gateway(&server, &arguments);
    let with_password = RespServer::gateway(&server, &arguments[4..]);
    let mut logged_in = with_password.connect();
    assert_eq!(logged_in.say("AUTH secret"), "+OK\r\n");
    let (mut silent, mut no_handshake) = (with_password.connect(), encrypted.connect());
    assert_eq!(silent.rest(), b"");
    // An alert may come before the end.
    assert!(no_handshake.rest().len() < 64);
    assert_eq!(logged_in.say("PING"), "+PONG\r\n");
}
