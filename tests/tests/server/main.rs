//! The server from outside: raw connections, region files and the `kv-server` process. The
//! integration tests prove how clients behave with it.
#![allow(clippy::unwrap_used, reason = "a test fails where it panics")]

mod attacks;
mod clients;
mod command;
mod restart;

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farside_config::ServerConfig;
use farside_config::size::ByteSize;
use farside_control::address::Address;
use farside_control::{
    BLOCKS_PER_MESSAGE_MAX, Challenge, ConnectRequest, FabricKind, FreeBlock, MESSAGE_BYTES_MAX,
    Proof, ProofMessage, Purpose, REQUEST_BYTES_MAX, Refusal, Request, Role, SecretKey,
    ServerMessage, ServerStatistics, SplitOutcome, Welcome,
};
use farside_fabric::memory::Region;
use farside_fabric::shm::Connection;
use farside_layout::{
    BLOCK_HEADER_BYTES, BlockStamp, DirectoryEntry, Format, Geometry, NamedBlock, SizeClass,
    SlotState, SlotWord, Superblock, seal, slot_in_subtable,
};
use farside_server::Server;
use farside_tests::handshake;
use tempfile::TempDir;
use zerocopy::IntoBytes;

/// The size of most tests' region.
const REGION_BYTES: u64 = 8 << 20;
/// Timeout: longer than any step takes, even on a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// A test's own folder, and a server configuration that points into it.
struct TestFolder {
    dir: TempDir,
    config: ServerConfig,
}

impl TestFolder {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = ServerConfig {
            listen: vec![Address::Shm(dir.path().join("kv.sock"))],
            memory: Some(ByteSize(REGION_BYTES)),
            // Several subtables, so that tests can confuse them on purpose.
            index: Some(ByteSize(64 << 10)),
            grace_ms: 1,
            ..Default::default()
        };
        Self { dir, config }
    }

    /// Returns a folder whose configuration has a region file, so that the region survives the
    /// server.
    fn with_file() -> Self {
        let mut folder = Self::new();
        folder.config.region_file = Some(folder.region_file());
        folder
    }

    fn region_file(&self) -> PathBuf {
        self.dir.path().join("region")
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("kv.sock")
    }

    fn start(&self) -> Server {
        Server::start(&self.config).unwrap()
    }

    /// Starts a server that must refuse to start; returns its error, one line.
    fn start_error(&self) -> String {
        let line = Server::start(&self.config).unwrap_err().to_string();
        assert!(!line.contains('\n') && line.len() > 20, "{line}");
        line
    }

    /// Connects without a request.
    fn connect(&self) -> Connection {
        let connection = Connection::connect(&self.socket(), TEST_TIMEOUT).unwrap();
        connection.set_receive_timeout(Some(TEST_TIMEOUT)).unwrap();
        connection
    }

    fn attach(&self, role: Role) -> Result<Client, Refusal> {
        let connection = self.connect();
        let (welcome, descriptor) = answer(&connection, &hello(role)).unwrap()?;
        let file = File::from(descriptor);
        let region = match role {
            Role::Reader => Region::map_read_only(&file).unwrap(),
            Role::Writer => Region::map(&file).unwrap(),
        };
        Ok(Client { connection, welcome, file, region: Arc::new(region) })
    }

    fn writer(&self) -> Client {
        self.attach(Role::Writer).unwrap()
    }
}

/// Sends a message; returns the server's answer, or `None` if it disconnects without one.
fn exchange(connection: &Connection, message: &[u8]) -> Option<(Vec<u8>, Option<OwnedFd>)> {
    connection.send(message, None).unwrap();
    let mut buffer = [0; 512];
    let (bytes, descriptor) = connection.receive(&mut buffer).unwrap();
    (bytes > 0).then(|| (buffer[..bytes].to_vec(), descriptor))
}

/// Sends a hello; returns the server's challenge, or `None` if it disconnects without an answer.
fn challenge(connection: &Connection, hello: &[u8]) -> Option<Result<Challenge, Refusal>> {
    let (answer, descriptor) = exchange(connection, hello)?;
    assert!(descriptor.is_none(), "only a welcome has a descriptor");
    Some(Challenge::decode(&answer).unwrap())
}

/// Sends a hello, and a proof if the server asks for it. Returns the server's last answer, or
/// `None` if it disconnects without one.
fn answer(connection: &Connection, hello: &[u8]) -> Option<Result<(Welcome, OwnedFd), Refusal>> {
    let challenge = match challenge(connection, hello)? {
        Ok(challenge) => challenge,
        Err(refusal) => return Some(Err(refusal)),
    };
    let request = ConnectRequest::decode(hello).unwrap();
    let (fabric, key) = (FabricKind::Shm, &SecretKey::NONE);
    let (proof, _) = handshake::answer(&request, fabric, key, &challenge);
    let (answer, descriptor) = exchange(connection, &proof)?;
    let welcome = Welcome::decode(&answer).unwrap();
    assert_eq!(descriptor.is_some(), welcome.is_ok(), "only a welcome has a descriptor");
    Some(welcome.map(|welcome| (welcome, descriptor.unwrap())))
}

/// Returns a server with the usual configuration, and its folder.
fn serving() -> (TestFolder, Server) {
    let folder = TestFolder::new();
    let server = folder.start();
    (folder, server)
}

/// Returns the subtables that splits can make, from this depth on: their prefixes, and the
/// prefixes' bits.
fn subtables_from(depth: u8) -> impl Iterator<Item = (u32, u8)> {
    (depth..31).flat_map(|depth| (0..1 << depth).map(move |prefix| (prefix, depth)))
}

/// Checks that no two of these blocks are at one address.
fn assert_distinct(blocks: &[FreeBlock]) {
    let addresses: BTreeSet<_> = blocks.iter().map(|block| block.address).collect();
    assert_eq!(addresses.len(), blocks.len());
}

/// A client that the server accepted, at the level of messages.
struct Client {
    connection: Connection,
    welcome: Welcome,
    file: File,
    region: Arc<Region>,
}

impl Client {
    fn send(&self, request: &Request) {
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        self.connection.send(&bytes, None).unwrap();
    }

    /// Returns the next answer; `None` if the server disconnected. Skips the server's questions.
    fn receive(&self) -> Option<ServerMessage> {
        loop {
            match self.receive_any() {
                Some(ServerMessage::Request(_)) => {}
                answer => return answer,
            }
        }
    }

    /// Returns the next message of any kind; `None` if the server disconnected.
    fn receive_any(&self) -> Option<ServerMessage> {
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        match self.connection.receive(&mut buffer) {
            Ok((0, _)) => None,
            Ok((bytes, _)) => Some(ServerMessage::decode(&buffer[..bytes]).unwrap()),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => None,
            Err(error) => panic!("{error}"),
        }
    }

    /// Takes blocks. Repeats the request while the server answers that it will have blocks soon.
    fn take(&self, class: SizeClass, count: u32) -> Vec<FreeBlock> {
        loop {
            self.send(&Request::TakeBlocks { class, count });
            match self.receive() {
                Some(ServerMessage::Blocks { soon: true, .. }) => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Some(ServerMessage::Blocks { class: found_class, soon: false, blocks, .. }) => {
                    assert!(found_class == class && blocks.len() <= BLOCKS_PER_MESSAGE_MAX);
                    return blocks;
                }
                other => panic!("{other:?}"),
            }
        }
    }

    fn give(&self, class: SizeClass, blocks: Vec<FreeBlock>, rested: bool) {
        self.send(&Request::GiveBlocks { class, rested, blocks });
    }

    fn statistics(&self) -> ServerStatistics {
        self.send(&Request::Statistics);
        match self.receive() {
            Some(ServerMessage::Statistics(statistics)) => statistics,
            other => panic!("{other:?}"),
        }
    }

    /// Returns the superblock, which must be valid.
    fn superblock(&self) -> (Superblock, Format) {
        let mut words = [0u64; 16];
        self.region.read(0, &mut words).unwrap();
        Superblock::decode(words.as_bytes(), self.region.bytes()).unwrap()
    }

    fn geometry(&self) -> Geometry {
        self.superblock().1.geometry()
    }

    /// Returns the offset of the directory, and its depth.
    fn directory(&self) -> (u64, u8) {
        let (superblock, format) = self.superblock();
        let geometry = format.geometry();
        let depth = superblock.directory_depth(&geometry).unwrap();
        (geometry.directory_offset(depth).unwrap(), depth)
    }

    /// Returns the offset of the subtable with this prefix of `depth` bits.
    fn subtable(&self, prefix: u32, depth: u8) -> u64 {
        let (directory, directory_depth) = self.directory();
        let entry = directory + (u64::from(prefix) << (directory_depth - depth)) * 8;
        let entry = DirectoryEntry::from_bits(self.region.load(entry).unwrap());
        entry.subtable(&self.geometry()).unwrap()
    }

    /// Returns the offset of a slot of the first subtable.
    fn slot(&self, row: usize, slot: usize) -> u64 {
        self.subtable(0, 0) + slot_in_subtable(row, slot)
    }

    /// Requests the split of the subtable with this prefix of `depth` bits.
    fn split(&self, prefix: u32, depth: u8) -> SplitOutcome {
        let directory_hash = prefix.checked_shl(32 - u32::from(depth)).unwrap_or(0);
        self.send(&Request::Split { directory_hash, local_depth: depth });
        match self.receive() {
            Some(ServerMessage::Split { outcome, .. }) => outcome,
            other => panic!("{other:?}"),
        }
    }

    /// Leaves no EMPTY word in the last window of the subtable with this prefix of `depth` bits.
    fn fill_window(&self, prefix: u32, depth: u8) {
        let subtable = self.subtable(prefix, depth);
        let tomb = SlotWord::empty(1).with_state(SlotState::Tomb).bits();
        for n in 0..14 {
            self.region.store(subtable + slot_in_subtable(62 + n / 7, n % 7), tomb).unwrap();
        }
    }

    fn lease(&self) -> u64 {
        let entry = self.geometry().client_entry(self.welcome.client_id).unwrap();
        self.region.load(entry).unwrap()
    }

    /// Writes a block that this client holds, and swaps a word for the block into a slot: a PENDING
    /// word, changed by `change_word`. Returns the word.
    fn place_word(
        &self,
        slot: u64,
        class: SizeClass,
        block: FreeBlock,
        change_word: impl Fn(SlotWord) -> SlotWord,
    ) -> SlotWord {
        let mut image = [0u64; 8];
        let bytes = image.as_mut_bytes();
        bytes[BLOCK_HEADER_BYTES as usize] = b'k';
        let stamp = BlockStamp {
            address: block.address,
            generation: block.generation,
            writer: self.welcome.client_id,
            written_at_ms: 1,
            expires_at_ms: 0,
            is_pinned: false,
        };
        seal(bytes, 1, 3, stamp).unwrap();
        self.region.write(block.address.claimed_offset(), &image).unwrap();
        let reference =
            NamedBlock { address: block.address, class, generation_low: block.generation as u8 };
        let old = SlotWord::from_bits(self.region.load(slot).unwrap());
        let new = change_word(old.pending(9, reference));
        let found = self.region.compare_swap(slot, old.bits(), new.bits()).unwrap();
        assert_eq!(found, old.bits());
        new
    }

    fn word(&self, slot: u64) -> SlotWord {
        SlotWord::from_bits(self.region.load(slot).unwrap())
    }
}

/// Returns the hello of a client.
fn hello(role: Role) -> [u8; REQUEST_BYTES_MAX] {
    handshake::hello(role, Purpose::Control).encode()
}

fn class(bytes: u64) -> SizeClass {
    SizeClass::for_bytes(bytes).unwrap()
}

/// Waits until a condition holds; panics with its description `what` after the timeout.
fn eventually(what: &str, holds: impl FnMut() -> bool) {
    farside_tests::wait_until(what, TEST_TIMEOUT, holds);
}
