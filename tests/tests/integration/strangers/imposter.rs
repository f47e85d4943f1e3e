//! An imposter: it answers like a server over RDMA, but is none.

use std::net::SocketAddr;
use std::time::Duration;

use farside::Client;
use farside_control::{
    PROTOCOL_VERSION, REPLY_BYTES_MAX, ServerMessage, ServerStatistics, SessionKey, Welcome,
};
use farside_fabric::ControlChannel;
use farside_fabric::memory::{HugePages, RegionMemory};
use farside_fabric::rdma::{Options, REASON_BYTES_MAX, RemoteRegion};
use farside_fabric::verbs::{DataConnection, Event, Incoming, Listener, Protection, VerbsChannel};
use farside_tests::device_or_left_out;

use super::*;

/// What an imposter does with a hello. It has no secret, and neither do its clients.
enum ImposterReply {
    /// Accepts with the right private data. On a control connection it answers the proof with these
    /// messages.
    Accept(Vec<Vec<u8>>),
    /// Accepts with these bytes as private data.
    Garble(Vec<u8>),
    /// Refuses with these bytes as private data.
    Reject(Vec<u8>),
}

/// An RDMA listener whose answers the test chooses.
struct Imposter {
    listener: Listener,
    protection: Protection,
    /// Control connections, each with the messages to send once the proof arrives.
    channels: Vec<(VerbsChannel, Vec<Vec<u8>>)>,
    sessions: Vec<DataConnection>,
    /// The key for the sessions of the last client.
    key: Option<SessionKey>,
    _memory: RegionMemory,
}

/// The nonce of the imposter's welcomes.
const DATA_NONCE: Nonce = Nonce([5; 16]);

impl Imposter {
    fn new(device: &str) -> Self {
        let address = SocketAddr::new(device.parse().unwrap(), 0);
        let memory = RegionMemory::anonymous(REGION_BYTES, HugePages::Never).unwrap();
        let protection = Protection::at(address, &memory.region, Role::Writer).unwrap();
        let listener = Listener::bind(address, &Options::default()).unwrap();
        let (channels, sessions) = (Vec::new(), Vec::new());
        Self { listener, protection, channels, sessions, key: None, _memory: memory }
    }

    fn options(&self) -> ConnectOptions {
        let address = format!("rdma://{}", self.listener.local_address().unwrap());
        options(&address, Role::Writer, SecretKey::NONE)
    }

    /// Returns the welcome of a real server.
    fn welcome(&self) -> Welcome {
        let remote = self.protection.remote();
        let RemoteRegion { base_address, region_bytes, rkeys, round_trip_min_ns, .. } = remote;
        let data_nonce = DATA_NONCE;
        Welcome {
            base_address,
            region_bytes,
            rkeys,
            round_trip_min_ns,
            data_nonce,
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
                    Some(_) => {}
                    None => std::thread::sleep(Duration::from_micros(200)),
                }
                let mut proof = vec![0; MESSAGE_BYTES_MAX];
                for (channel, messages) in &mut self.channels {
                    if matches!(channel.receive(&mut proof), Ok(Some(1..))) {
                        messages.drain(..).for_each(|message| channel.send(&message).unwrap());
                    }
                }
            }
            self.channels.clear();
            self.sessions.clear();
            client.join().unwrap()
        })
    }

    fn answer(&mut self, incoming: Incoming, answer: &mut dyn FnMut(Purpose) -> ImposterReply) {
        let hello = &incoming.private_data()[..REQUEST_BYTES_MAX];
        let (request, challenge, key) =
            handshake::challenge(hello, FabricKind::Rdma, &SecretKey::NONE);
        let accepted = match request.purpose {
            Purpose::Control | Purpose::Map => {
                self.key = Some(key);
                challenge
            }
            Purpose::Data { .. } => {
                let key = self.key.as_ref().expect("a session without a client");
                DataAccepted { proof: key.data_answer(&request, DATA_NONCE) }.encode()
            }
        };
        let (reply, messages) = match answer(request.purpose) {
            ImposterReply::Reject(reason) => return incoming.reject(&reason).unwrap(),
            ImposterReply::Accept(messages) => (accepted, messages),
            ImposterReply::Garble(reply) => (reply, Vec::new()),
        };
        match request.purpose {
            Purpose::Data { .. } => {
                self.sessions.push(incoming.accept_data(&self.protection, &reply).unwrap());
            }
            _ => self.channels.push((incoming.accept_control(&reply).unwrap(), messages)),
        }
    }
}

/// Checks that a client gets no session; returns the line that says why.
fn expect_no_session(options: &ConnectOptions) -> String {
    let error = match options.attach(options.timeout) {
        Err(error) => error,
        Ok(attached) => attached.factory.fabric(1).err().expect("a session with an imposter"),
    };
    let line = error.to_string();
    assert!(line.len() > 20 && !line.contains('\n'), "{line}");
    line
}

/// The garbage comes in place of the challenge, of the welcome, or of the answer to a session.
#[on(rdma_in_soak)]
fn a_garbled_answer_gives_no_session() {
    let Some(device) = device_or_left_out() else { return };
    let mut imposter = Imposter::new(&device);
    let (options, welcome) = (imposter.options(), imposter.welcome().encode());
    let mut random = SmallRng::seed_from_u64(7);
    let mut noise = |bytes: usize| {
        let mut noise = vec![0; bytes];
        random.fill_bytes(&mut noise);
        noise
    };
    let mut lines = std::collections::BTreeSet::new();
    let mut replies: Vec<Vec<u8>> = (1..=REPLY_BYTES_MAX).map(&mut noise).collect();
    replies.extend((1..welcome.len()).map(|bytes| welcome[..bytes].to_vec()));
    for (number, garbled) in replies.into_iter().enumerate() {
        let private_data =
            || ImposterReply::Garble(garbled[..garbled.len().min(REPLY_BYTES_MAX)].to_vec());
        let mut answer = |purpose| match (purpose, number % 4) {
            (Purpose::Control, 0) | (Purpose::Data { .. }, _) => private_data(),
            (_, 1) => ImposterReply::Accept(vec![welcome.clone()]),
            _ => ImposterReply::Accept(vec![garbled.clone()]),
        };
        lines.insert(imposter.while_client(&mut answer, || expect_no_session(&options)));
    }
    lines.iter().for_each(|line| println!("{line}"));
    assert!(lines.iter().any(|line| line.contains("does not speak Farside's protocol")));
}

#[on(rdma_in_soak)]
fn a_garbled_refusal_still_refuses() {
    let Some(device) = device_or_left_out() else { return };
    let mut imposter = Imposter::new(&device);
    let options = imposter.options();
    let valid = Refusal::Full { clients: 7 }.encode();
    let mut random = SmallRng::seed_from_u64(9);
    let mut reasons: Vec<Vec<u8>> = (0..=REASON_BYTES_MAX).map(|bytes| vec![0xa5; bytes]).collect();
    reasons.extend((0..scaled(5_000)).map(|_| garbage(&mut random, &valid, REASON_BYTES_MAX)));
    for reason in reasons {
        let mut answer = |_| ImposterReply::Reject(reason.clone());
        imposter.while_client(&mut answer, || expect_no_session(&options));
    }
    let mut answer = |_| ImposterReply::Reject(valid.clone());
    let line = imposter.while_client(&mut answer, || expect_no_session(&options));
    assert!(line.contains("the server has 7 clients, which is its maximum"), "{line}");
}

#[on(rdma_in_soak)]
fn a_server_of_another_version_is_reported_with_both_versions() {
    let Some(device) = device_or_left_out() else { return };
    let mut imposter = Imposter::new(&device);
    let options = imposter.options();
    let (client, highest) = (Versions::OWN, PROTOCOL_VERSION + 2);
    let server = Versions { lowest: PROTOCOL_VERSION + 1, highest };
    let (version, nonce, proofs) = (highest, Nonce([1; 16]), [Proof([2; 16]); 2]);
    for (mut answer, says) in [
        (
            ImposterReply::Reject(Refusal::Version { server, client }.encode()),
            format!("the server speaks protocol {server}, this client {client}"),
        ),
        (
            ImposterReply::Garble(Challenge { version, nonce, proofs }.encode()),
            format!("protocol version has the unknown value {highest}"),
        ),
    ] {
        let mut answer = |_| std::mem::replace(&mut answer, ImposterReply::Reject(Vec::new()));
        let line = imposter.while_client(&mut answer, || expect_no_session(&options));
        println!("{line}");
        assert!(line.contains(&says), "{line}");
    }
}

/// The client has a secret, which the imposter does not know. It gets neither a proof nor a verb.
#[on(rdma_in_soak)]
fn an_imposter_gets_no_proof() {
    let Some(device) = device_or_left_out() else { return };
    let mut imposter = Imposter::new(&device);
    let options = ConnectOptions { secret_key: SecretKey::of("secret"), ..imposter.options() };
    let welcome = imposter.welcome().encode();
    let mut answer = |_| ImposterReply::Accept(vec![welcome.clone()]);
    let line = imposter.while_client(&mut answer, || expect_no_session(&options));
    assert!(line.contains("does not prove that it knows this client's secret"), "{line}");
}

/// The client's control thread treats garbage as the end of the connection, and the call connects
/// again. Each round has its own client: after garbage that is a valid answer, a connection gets no
/// more answers.
#[on(rdma_in_soak)]
fn garbage_on_the_control_channel_ends_the_connection() {
    let Some(device) = device_or_left_out() else { return };
    let mut imposter = Imposter::new(&device);
    let options = imposter.options();
    let welcome = imposter.welcome().encode();
    let mut random = SmallRng::seed_from_u64(10);
    let mut valid = Vec::new();
    ServerMessage::Statistics(ServerStatistics::default()).encode(&mut valid);
    let mut connections = 0;
    let mut answer = |_| {
        connections += 1;
        let mut message = garbage(&mut random, &valid, 512);
        message.resize(message.len().max(1), 0);
        ImposterReply::Accept(vec![welcome.clone(), message])
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
