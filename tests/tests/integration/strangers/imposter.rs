//! An imposter: it answers like a server over RDMA, but is none.

use std::net::SocketAddr;
use std::time::Duration;

use farside::Client;
use farside_control::attach::ConnectError;
use farside_control::{
    PROTOCOL_VERSION, REPLY_BYTES, REPLY_BYTES_MAX, ServerMessage, ServerStatistics, Welcome,
    encode_reply,
};
use farside_fabric::ControlChannel;
use farside_fabric::rdma::{Options, REASON_BYTES_MAX, RemoteRegion};
use farside_fabric::shm::{HugePages, RegionMemory};
use farside_fabric::verbs::{DataConnection, Event, Incoming, Listener, Protection, VerbsChannel};
use farside_tests::device_or_left_out;

use super::*;

/// An imposter's answer to a request.
enum ImposterReply {
    /// Accepts with the first bytes as private data; then sends the others as a message, if any.
    Accept(Vec<u8>, Vec<u8>),
    /// Refuses with these bytes as private data.
    Reject(Vec<u8>),
}

/// An RDMA listener whose answers the test chooses.
struct Imposter {
    listener: Listener,
    protection: Protection,
    /// Control connections, each with the message to send on it.
    channels: Vec<(VerbsChannel, Vec<u8>)>,
    sessions: Vec<DataConnection>,
    _memory: RegionMemory,
}

impl Imposter {
    fn new(device: &str) -> Self {
        let address = SocketAddr::new(device.parse().unwrap(), 0);
        let memory = RegionMemory::anonymous(REGION_BYTES, HugePages::Never).unwrap();
        let protection = Protection::at(address, &memory.region, Role::Writer).unwrap();
        let listener = Listener::bind(address, &Options::default()).unwrap();
        let (channels, sessions) = (Vec::new(), Vec::new());
        Self { listener, protection, channels, sessions, _memory: memory }
    }

    fn options(&self) -> ConnectOptions {
        let address = format!("rdma://{}", self.listener.local_address().unwrap());
        options(&address, Role::Writer, Token::NONE)
    }

    /// Returns the welcome of a real server.
    fn welcome(&self) -> Welcome {
        let remote = self.protection.remote();
        let RemoteRegion { base_address, region_bytes, rkeys, round_trip_min_ns, .. } = remote;
        let session_secret = 5;
        Welcome {
            base_address,
            region_bytes,
            rkeys,
            round_trip_min_ns,
            session_secret,
            ..false_welcome()
        }
    }

    /// Answers requests while `client` runs: first its control connection, then its sessions.
    fn while_client<T: Send>(
        &mut self,
        answer: &mut dyn FnMut(Purpose) -> ImposterReply,
        client: impl FnOnce() -> T + Send,
    ) -> T {
        std::thread::scope(|scope| {
            let client = scope.spawn(client);
            while !client.is_finished() {
                match self.listener.next_event().unwrap() {
                    Some(Event::Request(incoming)) => self.answer(incoming, answer),
                    // Before this event the client's device would not take the message.
                    Some(Event::Established(id)) => {
                        for (channel, message) in &mut self.channels {
                            if channel.id() == id && !message.is_empty() {
                                channel.send(message).unwrap();
                            }
                        }
                    }
                    Some(_) => {}
                    None => std::thread::sleep(Duration::from_micros(200)),
                }
            }
            self.channels.clear();
            self.sessions.clear();
            client.join().unwrap()
        })
    }

    fn answer(&mut self, incoming: Incoming, answer: &mut dyn FnMut(Purpose) -> ImposterReply) {
        let request = ConnectRequest::decode(&incoming.private_data()[..REQUEST_BYTES_MAX]);
        let Ok(ConnectRequest { purpose, .. }) = request else {
            panic!("a client's request is malformed")
        };
        match answer(purpose) {
            ImposterReply::Reject(reason) => incoming.reject(&reason).unwrap(),
            ImposterReply::Accept(reply, message) if purpose == Purpose::Control => {
                self.channels.push((incoming.accept_control(&reply).unwrap(), message));
            }
            ImposterReply::Accept(reply, _) => {
                self.sessions.push(incoming.accept_data(&self.protection, &reply).unwrap());
            }
        }
    }
}

/// Checks that a client gets no session; returns the line that says why.
fn expect_no_session(options: &ConnectOptions, welcome: &Welcome) -> String {
    let error = match options.attach(options.timeout) {
        Err(error) => error,
        // A flipped bit in a number can leave a valid welcome, with other numbers.
        Ok(attached) => {
            let is_same = attached.welcome == *welcome;
            let error = attached.factory.fabric(1).err().expect("a session with an imposter");
            assert!(!is_same || matches!(error, ConnectError::Control(_)), "{error}");
            error
        }
    };
    let line = error.to_string();
    assert!(line.len() > 20 && !line.contains('\n'), "{line}");
    line
}

#[test]
fn a_garbled_welcome_gives_no_session() {
    let Some(device) = device_or_left_out() else { return };
    let mut imposter = Imposter::new(&device);
    let (options, welcome) = (imposter.options(), imposter.welcome());
    let valid = encode_reply(&Ok(welcome));
    let mut random = SmallRng::seed_from_u64(7);
    let mut noise = |bytes: usize| {
        let mut noise = vec![0; bytes];
        random.fill_bytes(&mut noise);
        noise
    };
    let mut lines = std::collections::BTreeSet::new();
    let mut replies: Vec<Vec<u8>> = (0..=REPLY_BYTES_MAX).map(&mut noise).collect();
    replies.extend((0..REPLY_BYTES).map(|bytes| valid[..bytes].to_vec()));
    let mut random = SmallRng::seed_from_u64(8);
    replies.extend((0..scaled(5_000)).map(|_| garbage(&mut random, &valid, REPLY_BYTES_MAX)));
    // RDMA-CM pads with zeros, so a reply that lacks only zeros at its end arrives intact.
    let end = valid.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    replies.retain(|reply| !reply.starts_with(&valid[..end]));
    for (number, reply) in replies.into_iter().enumerate() {
        // The garbage replaces the welcome on the control connection, or its repetition on the data
        // connection.
        let replaces_welcome = number % 4 != 0;
        let mut answer = |purpose| match (purpose == Purpose::Control) == replaces_welcome {
            true => ImposterReply::Accept(reply.clone(), Vec::new()),
            false => ImposterReply::Accept(valid.to_vec(), Vec::new()),
        };
        lines.insert(imposter.while_client(&mut answer, || expect_no_session(&options, &welcome)));
    }
    lines.iter().for_each(|line| println!("{line}"));
    assert!(lines.iter().any(|line| line.contains("does not speak Farside's protocol")));
}

#[test]
fn a_garbled_refusal_still_refuses() {
    let Some(device) = device_or_left_out() else { return };
    let mut imposter = Imposter::new(&device);
    let (options, welcome) = (imposter.options(), imposter.welcome());
    let valid = encode_reply(&Err(Refusal::Full { clients: 7 }));
    let mut random = SmallRng::seed_from_u64(9);
    let mut reasons: Vec<Vec<u8>> = (0..=REASON_BYTES_MAX).map(|bytes| vec![0xa5; bytes]).collect();
    reasons.extend((0..scaled(5_000)).map(|_| garbage(&mut random, &valid, REASON_BYTES_MAX)));
    for reason in reasons {
        let mut answer = |_| ImposterReply::Reject(reason.clone());
        imposter.while_client(&mut answer, || expect_no_session(&options, &welcome));
    }
    let mut answer = |_| ImposterReply::Reject(valid.to_vec());
    let line = imposter.while_client(&mut answer, || expect_no_session(&options, &welcome));
    assert!(line.contains("the server has 7 clients, which is its maximum"), "{line}");
}

#[test]
fn a_server_of_another_version_is_reported_with_both_versions() {
    let Some(device) = device_or_left_out() else { return };
    let mut imposter = Imposter::new(&device);
    let (options, welcome) = (imposter.options(), imposter.welcome());
    let (ours, theirs) = (u64::from(PROTOCOL_VERSION), u64::from(PROTOCOL_VERSION) + 1);
    let versions = Refusal::Version { server: theirs, client: ours };
    let mut newer = encode_reply(&Ok(welcome));
    newer[4] += 1;
    for (mut answer, says) in [
        (
            ImposterReply::Reject(encode_reply(&Err(versions))),
            format!("the server speaks protocol version {theirs}, this client {ours}"),
        ),
        (
            ImposterReply::Accept(newer.to_vec(), Vec::new()),
            format!("protocol version has the unknown value {theirs}"),
        ),
    ] {
        let mut answer = |_| std::mem::replace(&mut answer, ImposterReply::Reject(Vec::new()));
        let line = imposter.while_client(&mut answer, || expect_no_session(&options, &welcome));
        println!("{line}");
        assert!(line.contains(&says), "{line}");
    }
}

/// The client's control thread treats garbage as the end of the connection, and the call connects
/// again. Each round has its own client: after garbage that is a valid answer, a connection gets no
/// more answers.
#[test]
fn garbage_on_the_control_channel_ends_the_connection() {
    let Some(device) = device_or_left_out() else { return };
    let mut imposter = Imposter::new(&device);
    let options = imposter.options();
    let welcome = encode_reply(&Ok(imposter.welcome()));
    let mut random = SmallRng::seed_from_u64(10);
    let mut valid = Vec::new();
    ServerMessage::Statistics(ServerStatistics::default()).encode(&mut valid);
    let mut connections = 0;
    let mut answer = |_| {
        connections += 1;
        let mut message = garbage(&mut random, &valid, 512);
        message.resize(message.len().max(1), 0);
        ImposterReply::Accept(welcome.to_vec(), message)
    };
    let address = options.address.to_string();
    let rounds = scaled(2_500);
    let answered = imposter.while_client(&mut answer, || {
        let connect = || Client::builder().server(&address).connect().unwrap();
        (0..rounds).filter(|_| connect().admin().statistics().is_ok()).count()
    });
    // A flipped bit in a number can leave a valid answer, with another number.
    println!("{answered} of {rounds} calls had an answer, over {connections} connections");
    assert!(connections > rounds);
}
