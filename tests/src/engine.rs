//! The protocol's engine, connected to a server over the test's own fabric.

use std::collections::VecDeque;
use std::io;

use farside_control::attach::{Attached, ConnectOptions};
use farside_control::{
    ControlChannel, MESSAGE_BYTES_MAX, Request, Role, SecretKey, ServerMessage, Welcome,
};
use farside_fabric::shm::ShmFabric;
use farside_fabric::{AnyFabric, Fabric, RegionIndex};
use farside_layout::hash::KeyHash;
use farside_layout::{FreeBlock, SizeClass};
use farside_protocol::allocator::{BlockDelivery, BlockSource, Delivery};
use farside_protocol::{ConnectionCache, Engine, OpenRegion, Prefix, RegionHandle, RegionOptions};

use crate::TEST_TIMEOUT;

/// Blocks from a server, over a control channel that nothing else uses. Dropping it says no
/// goodbye.
pub struct ChannelBlocks {
    channel: Box<dyn ControlChannel>,
    buffer: Vec<u8>,
    answers: VecDeque<Delivery>,
}

impl ChannelBlocks {
    /// Blocks over this channel.
    pub fn over(channel: Box<dyn ControlChannel>) -> Self {
        Self { channel, buffer: vec![0; MESSAGE_BYTES_MAX], answers: VecDeque::new() }
    }

    fn send(&mut self, request: &Request) {
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        // The server takes no more requests until this client takes its answers.
        while let Err(error) = self.channel.send(&bytes) {
            // A test has killed the server.
            if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) {
                return;
            }
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
            if !self.take_answer() {
                std::thread::yield_now();
            }
        }
    }

    /// Takes a message of the server; returns whether there was one.
    fn take_answer(&mut self) -> bool {
        let Some(bytes) = self.channel.receive(&mut self.buffer).unwrap() else { return false };
        match ServerMessage::decode(&self.buffer[..bytes]).unwrap() {
            ServerMessage::Blocks { class, rested, soon, blocks } => {
                let delivery = BlockDelivery { class, rested, soon, blocks };
                self.answers.push_back(Delivery::Blocks(delivery));
            }
            ServerMessage::Split { directory_hash, local_depth, outcome } => {
                let prefix = Prefix::of(directory_hash, local_depth);
                self.answers.push_back(Delivery::Split(prefix, outcome));
            }
            ServerMessage::AllPinned { class } => {
                self.answers.push_back(Delivery::AllPinned(class))
            }
            ServerMessage::Larger { class, larger } => {
                self.answers.push_back(Delivery::Larger(class, larger));
            }
            ServerMessage::RoomLater { class, in_ms } => {
                self.answers.push_back(Delivery::RoomLater(class, in_ms));
            }
            // No test that uses this engine waits for a collection.
            ServerMessage::Statistics(_)
            | ServerMessage::Clients { .. }
            | ServerMessage::Kicked { .. }
            | ServerMessage::Hot { .. }
            | ServerMessage::Heartbeat { .. }
            | ServerMessage::Map { .. }
            | ServerMessage::Request(_) => {}
        }
        true
    }
}

impl BlockSource for ChannelBlocks {
    fn request(&mut self, class: SizeClass, count: u32) {
        self.send(&Request::TakeBlocks { class, count });
    }

    fn request_split(&mut self, prefix: Prefix) {
        let (directory_hash, local_depth) = (prefix.directory_hash(), prefix.local_depth);
        self.send(&Request::Split { directory_hash, local_depth });
    }

    fn receive(&mut self) -> Option<Delivery> {
        while self.answers.is_empty() && self.take_answer() {}
        self.answers.pop_front()
    }

    fn give(&mut self, class: SizeClass, rested: bool, blocks: Vec<FreeBlock>) {
        if !blocks.is_empty() {
            self.send(&Request::GiveBlocks { class, rested, blocks });
        }
    }

    fn give_heads(&mut self, class: SizeClass, blocks: Vec<FreeBlock>) {
        self.send(&Request::GiveHeads { class, blocks });
    }

    fn announce_expiry(&mut self) {
        self.send(&Request::Expires);
    }

    fn is_lost(&self) -> bool {
        false
    }
}

/// An engine, and the server's region that it has opened.
pub struct TestEngine<F> {
    /// The region.
    pub region: OpenRegion,
    engine: Engine<F>,
}

impl<F: Fabric> TestEngine<F> {
    /// Returns the engine's handle of the region.
    pub fn handle(&self) -> RegionHandle<'_, F> {
        self.engine.at(&self.region)
    }

    /// Returns the key with its hash.
    pub fn hashed<'k>(&self, key: &'k [u8]) -> (KeyHash, &'k [u8]) {
        self.region.hashed(key)
    }
}

impl<F> std::ops::Deref for TestEngine<F> {
    type Target = Engine<F>;

    fn deref(&self) -> &Engine<F> {
        &self.engine
    }
}

/// Returns options for connecting to a server, with defaults otherwise.
pub fn connect_options(address: &str, role: Role, secret_key: SecretKey) -> ConnectOptions {
    let (address, timeout) = (address.parse().unwrap(), TEST_TIMEOUT);
    ConnectOptions {
        address,
        others: Vec::new(),
        role,
        view: None,
        secret_key,
        timeout,
        answer_timeout: timeout,
        rdma: Default::default(),
        tls: Default::default(),
        trust: farside_fabric::Trust::forever(),
    }
}

/// Attaches to a server, as a writer.
pub fn attach(address: &str) -> Attached {
    connect_options(address, Role::Writer, SecretKey::NONE).connect().unwrap()
}

/// Opens the region with this index in an engine's fabric: the region that `welcome` describes.
pub fn open_region<F: Fabric>(
    engine: &Engine<F>,
    index: RegionIndex,
    welcome: &Welcome,
    channel: Box<dyn ControlChannel>,
) -> OpenRegion {
    let Welcome { region_id, region_bytes, client_id, .. } = *welcome;
    let (cache_bytes, trust) = (64 << 20, farside_fabric::Trust::forever());
    let options = RegionOptions { region_id, region_bytes, client_id, cache_bytes, trust };
    let blocks = Box::new(ChannelBlocks::over(channel));
    engine.open(index, blocks, options, &ConnectionCache::default()).unwrap()
}

/// The lanes of the engines of [`engine_over`].
pub const ENGINE_LANES: u16 = 64;

/// Returns an engine over the fabric that `around` makes of a shared-memory fabric.
pub fn engine_over<F: Fabric>(address: &str, around: impl FnOnce(ShmFabric) -> F) -> TestEngine<F> {
    let (Attached { welcome, factory, channel, .. }, lanes) = (attach(address), ENGINE_LANES);
    let AnyFabric::Shm(fabric) = factory.fabric(lanes).unwrap() else { unreachable!() };
    let engine = Engine::new(around(fabric), lanes);
    let region = open_region(&engine, RegionIndex::FIRST, &welcome, channel);
    TestEngine { region, engine }
}
