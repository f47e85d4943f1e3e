//! Proves that a log without a reader stops no program. Guards against threads that wait until
//! stderr takes a line.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;

use farside_tests::command::command;
use farside_tests::{ServerProcess, TEST_TIMEOUT, free_tcp_address, send_signal, wait_until};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Signal;

/// A pipe without room for another byte: its end for reading, and that for writing.
fn full_pipe() -> (std::fs::File, OwnedFd) {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    for part in [&[b'.'; 4096][..], b"."] {
        while rustix::io::write(&writer, part).is_ok() {}
    }
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    (reader.into(), writer)
}

#[on(each, rdma_in_soak)]
fn a_log_without_a_reader_stops_no_server() {
    let folder = tempfile::tempdir().unwrap();
    let (mut reader, writer) = full_pipe();
    let start = |writer: OwnedFd| {
        ServerProcess::spawn_in(folder.path(), "--memory 16MiB", |command| command.stderr(writer))
    };
    let mut server = start(writer.try_clone().unwrap());
    let client = server.client_builder().connect_timeout(TEST_TIMEOUT).connect().unwrap();
    client.session().unwrap().put("key", "value").unwrap();
    drop(client);
    assert_eq!(server.terminate(), Some(0));
    // Nothing was read. The lines of the next server are read after a while.
    let mut server = start(writer);
    let client = server.client_builder().connect_timeout(TEST_TIMEOUT).connect().unwrap();
    let log = std::thread::spawn(move || {
        let mut log = String::new();
        reader.read_to_string(&mut log).unwrap();
        log
    });
    drop(client);
    assert_eq!(server.terminate(), Some(0));
    let log = log.join().unwrap();
    for line in ["serving", "a client connected", "stopped"] {
        assert_eq!(log.matches(line).count(), 1, "{line}: {log}");
    }
}

#[on(each, rdma_in_soak)]
fn a_log_without_a_reader_stops_no_gateway() {
    let server = ServerProcess::start("--memory 16MiB");
    let listen = free_tcp_address();
    let (_reader, writer) = full_pipe();
    let mut gateway = command("kv-resp");
    gateway.args(["--server", &server.address(), "--listen", &listen]).stderr(writer);
    let mut gateway = gateway.spawn().unwrap();
    let address = listen.strip_prefix("tcp://").unwrap();
    let mut connection = None;
    wait_until("it listens", TEST_TIMEOUT, || {
        connection = TcpStream::connect(address).ok();
        connection.is_some()
    });
    let mut connection = connection.unwrap();
    connection.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    connection.write_all(b"PING\r\n").unwrap();
    let mut answer = [0; 7];
    connection.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"+PONG\r\n");
    send_signal(&gateway, Signal::TERM);
    wait_until("it has ended", TEST_TIMEOUT, || gateway.try_wait().unwrap().is_some());
}
