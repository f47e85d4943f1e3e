//! The control channel keeps messages complete and in order, limits a fast sender, wakes a sleeping
//! receiver, and reports its end.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use farside_fabric::verbs::VerbsChannel;
use farside_fabric::{ControlChannel, MESSAGE_BYTES_MAX};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::harness::{Server, TEST_TIMEOUT};

fn readable_within(channel: &impl AsFd, most: Duration) -> bool {
    let timeout = Timespec::try_from(most).unwrap();
    poll(&mut [PollFd::new(channel, PollFlags::IN)], Some(&timeout)).unwrap() > 0
}

/// Sleeps until a message arrives; returns its length.
fn receive(channel: &mut VerbsChannel, buffer: &mut [u8]) -> usize {
    loop {
        if let Some(bytes) = channel.receive(buffer).unwrap() {
            return bytes;
        }
        assert!(readable_within(channel, TEST_TIMEOUT), "no message came");
    }
}

/// Sleeps until the channel has room, then sends.
fn send(channel: &mut VerbsChannel, message: &[u8]) {
    while let Err(error) = channel.send(message) {
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(readable_within(channel, TEST_TIMEOUT), "no room came");
    }
}

#[test]
fn long_messages_go_both_ways() {
    let Some(mut server) = Server::new() else { return };
    let (mut client_end, mut server_end) = server.control();
    let mut buffer = vec![0; MESSAGE_BYTES_MAX];
    for round in 0u8..40 {
        let message = vec![round; MESSAGE_BYTES_MAX - usize::from(round)];
        send(&mut client_end, &message);
        assert_eq!(receive(&mut server_end, &mut buffer), message.len());
        assert!(buffer.starts_with(&message));
        send(&mut server_end, &message);
        assert_eq!(receive(&mut client_end, &mut buffer), message.len());
        assert!(buffer.starts_with(&message));
    }
    for length in [0, MESSAGE_BYTES_MAX + 1] {
        let refused = client_end.send(&vec![0; length]).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
    }
    send(&mut client_end, b"too long");
    let received = loop {
        match server_end.receive(&mut buffer[..3]) {
            Ok(None) => assert!(readable_within(&server_end, TEST_TIMEOUT)),
            other => break other,
        }
    };
    assert_eq!(received.unwrap_err().kind(), io::ErrorKind::InvalidData);
}

#[test]
fn a_thousand_small_messages_keep_their_order_if_the_receiver_is_slow() {
    let Some(mut server) = Server::new() else { return };
    let (mut client_end, mut server_end) = server.control();
    let started = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0u32..1000 {
                send(&mut client_end, &number.to_le_bytes());
            }
            client_end.flush(TEST_TIMEOUT).unwrap();
        });
        let mut buffer = [0; 64];
        for number in 0u32..1000 {
            if number % 100 == 50 {
                std::thread::sleep(Duration::from_millis(20));
            }
            assert_eq!(receive(&mut server_end, &mut buffer), 4);
            assert_eq!(buffer[..4], number.to_le_bytes());
        }
    });
    println!("1000 messages in {:?}", started.elapsed());
}

#[test]
fn a_sender_is_refused_after_eight_messages_that_are_not_received() {
    let Some(mut server) = Server::new() else { return };
    let (mut client_end, mut server_end) = server.control();
    let mut sent = 0u32;
    let started = Instant::now();
    let error = loop {
        match client_end.send(&sent.to_le_bytes()) {
            Ok(()) => sent += 1,
            // The device may still be sending some of the messages.
            Err(_) if started.elapsed() < Duration::from_millis(300) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    assert_eq!(sent, 8, "four received and four to be sent");
    let mut buffer = [0; 64];
    for number in 0..sent {
        assert_eq!(receive(&mut server_end, &mut buffer), 4);
        assert_eq!(buffer[..4], number.to_le_bytes());
    }
    assert_eq!(server_end.receive(&mut buffer).unwrap(), None);
    send(&mut client_end, b"more");
    assert_eq!(receive(&mut server_end, &mut buffer), 4);
}

/// Probes before and after messages, more of them than the send queue has entries. The probe of a
/// host that does not answer is tested on two hosts: `tests/vm/two-hosts`.
#[test]
fn probes_do_not_delay_messages_or_fill_the_channel() {
    let Some(mut server) = Server::new() else { return };
    let (mut client_end, mut server_end) = server.control();
    let mut buffer = [0; 64];
    for number in 0u32..100 {
        server_end.probe().unwrap();
        send(&mut server_end, &number.to_le_bytes());
        server_end.probe().unwrap();
        assert_eq!(receive(&mut client_end, &mut buffer), 4);
        assert_eq!(buffer[..4], number.to_le_bytes());
        send(&mut client_end, &number.to_le_bytes());
        assert_eq!(receive(&mut server_end, &mut buffer), 4);
    }
    // Also towards a peer that does not receive its messages.
    while client_end.send(b"not taken").is_ok() {}
    for _ in 0..20 {
        client_end.probe().unwrap();
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(client_end.receive(&mut buffer).unwrap(), None);
    }
    drop(client_end);
    let started = Instant::now();
    while server_end.receive(&mut buffer).unwrap() != Some(0) {
        assert!(started.elapsed() < TEST_TIMEOUT, "no end came");
        server.step();
    }
    assert!(server_end.probe().is_ok(), "a probe after the end does nothing");
}

#[test]
fn an_idle_channel_lets_its_thread_sleep() {
    let Some(mut server) = Server::new() else { return };
    let (mut client_end, mut server_end) = server.control();
    let mut buffer = [0; 64];
    for _ in 0..3 {
        // Consumes the events that connecting left.
        assert_eq!(server_end.receive(&mut buffer).unwrap(), None);
        assert_eq!(client_end.receive(&mut buffer).unwrap(), None);
    }
    assert!(!readable_within(&server_end, Duration::from_millis(200)));
    assert!(!readable_within(&client_end, Duration::from_millis(10)));
    client_end.send(b"wake up").unwrap();
    assert!(readable_within(&server_end, TEST_TIMEOUT));
    assert_eq!(server_end.receive(&mut buffer).unwrap(), Some(7));
    assert_eq!(server_end.receive(&mut buffer).unwrap(), None);
    assert!(!readable_within(&server_end, Duration::from_millis(50)));
}

#[test]
fn the_last_messages_arrive_before_the_end() {
    let Some(mut server) = Server::new() else { return };
    let mut buffer = [0; 64];
    for client_ends in [true, false] {
        let (client_end, server_end) = server.control();
        let (mut ends, mut stays) =
            if client_ends { (client_end, server_end) } else { (server_end, client_end) };
        for message in [b"one", b"two"] {
            send(&mut ends, message);
        }
        ends.flush(TEST_TIMEOUT).unwrap();
        drop(ends);
        let mut lengths = Vec::new();
        let started = Instant::now();
        loop {
            server.step();
            match stays.receive(&mut buffer).unwrap() {
                Some(0) => break,
                Some(bytes) => lengths.push(bytes),
                None => {
                    readable_within(&stays, Duration::from_millis(5));
                }
            }
            assert!(started.elapsed() < TEST_TIMEOUT, "no end came");
        }
        assert_eq!(lengths, [3, 3]);
        assert_eq!(stays.receive(&mut buffer).unwrap(), Some(0), "the end stays");
        assert_eq!(stays.send(b"late").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        assert!(stays.flush(TEST_TIMEOUT).is_ok(), "nothing was left to send");
    }
}
