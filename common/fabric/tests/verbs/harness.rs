//! A server and its clients in one process.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farside_fabric::memory::{HugePages, Region, RegionMemory};
use farside_fabric::rdma::{ConnectionId, Options, RemoteRegion, Rkeys, SLICES_MAX, preflight};
use farside_fabric::verbs::{
    DataConnection, Event, Incoming, Listener, Protection, VerbsChannel, VerbsFabric,
    connect_control, connect_data,
};
use farside_fabric::{Buffer, Completion, Fabric, Nanos, RegionIndex, Role, Verb};

pub(crate) const REGION_BYTES: u64 = 8 << 20;
/// The index of the region, in a fabric that has only this region.
pub(crate) const REGION: RegionIndex = RegionIndex::FIRST;
/// Limit on every wait. It is long, because an emulated device is slow.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns the IPv4 address of an RDMA device: that in `FARSIDE_TEST_DEVICE`, or the first one. If
/// there is none, prints that the test is skipped.
pub(crate) fn address() -> Option<SocketAddr> {
    let wanted = std::env::var("FARSIDE_TEST_DEVICE").ok().filter(|wanted| !wanted.is_empty());
    let report = preflight();
    let mut addresses = report.addresses().map(|(_, address)| SocketAddr::new(address, 0));
    let found = addresses
        .find(|found| wanted.as_ref().is_none_or(|wanted| *wanted == found.ip().to_string()));
    if let (None, Some(wanted)) = (found, wanted) {
        panic!("no RDMA device has the address {wanted} of FARSIDE_TEST_DEVICE: {report}");
    }
    if found.is_none() {
        println!("skipped: no RDMA device with an IPv4 address");
    }
    found
}

/// The accepting end.
pub(crate) struct Server {
    pub(crate) listener: Listener,
    pub(crate) region: Arc<Region>,
    pub(crate) writers: Protection,
    pub(crate) readers: Protection,
    pub(crate) connections: BTreeMap<ConnectionId, DataConnection>,
    pub(crate) channels: BTreeMap<ConnectionId, VerbsChannel>,
    /// The connections whose peers have disconnected.
    pub(crate) disconnected: Vec<ConnectionId>,
    /// The private data of refused connection requests.
    pub(crate) refused_requests: Vec<Vec<u8>>,
    _memory: RegionMemory,
}

/// The connection requests of these tests.
pub(crate) const WRITER: &[u8] = b"W";
pub(crate) const READER: &[u8] = b"R";
pub(crate) const CONTROL: &[u8] = b"C";
/// The reason for refusing everything else.
pub(crate) const REASON: &[u8] = b"this is no request";

impl Server {
    pub(crate) fn new() -> Option<Self> {
        Self::of_region(REGION_BYTES, None)
    }

    /// Serves a region of this length, in slices if their length is given.
    pub(crate) fn of_region(region_bytes: u64, slice_bytes: Option<u64>) -> Option<Self> {
        let address = address()?;
        let memory = RegionMemory::anonymous(region_bytes, HugePages::Never).unwrap();
        memory.reserve().unwrap();
        let region = memory.region.clone();
        let register = |role| Protection::in_slices(address, &region, role, slice_bytes).unwrap();
        Some(Self {
            listener: Listener::bind(address, &Options::default()).unwrap(),
            writers: register(Role::Writer),
            readers: register(Role::Reader),
            region,
            connections: BTreeMap::new(),
            channels: BTreeMap::new(),
            disconnected: Vec::new(),
            refused_requests: Vec::new(),
            _memory: memory,
        })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.listener.local_address().unwrap()
    }

    /// Handles one event of the listener. Returns false if there is none.
    pub(crate) fn step(&mut self) -> bool {
        match self.listener.next_event().unwrap() {
            Some(Event::Request(incoming)) => self.answer(incoming),
            Some(Event::Established(_)) => {}
            Some(Event::Disconnected(id)) => self.disconnected.push(id),
            None => return false,
        }
        true
    }

    fn answer(&mut self, incoming: Incoming) {
        let private_data = incoming.private_data();
        let end = private_data.iter().position(|byte| *byte == 0).unwrap_or(private_data.len());
        let request = private_data[..end].to_vec();
        let protection = match &request[..] {
            WRITER => &self.writers,
            READER => &self.readers,
            CONTROL => {
                let channel = incoming.accept_control(b"hello").unwrap();
                self.channels.insert(channel.id(), channel);
                return;
            }
            _ => {
                self.refused_requests.push(private_data.to_vec());
                return incoming.reject(REASON).unwrap();
            }
        };
        assert!(protection.serves(&incoming));
        let RemoteRegion { base_address, region_bytes, rkeys, .. } = protection.remote();
        let mut reply = base_address.to_le_bytes().to_vec();
        reply.extend_from_slice(&region_bytes.to_le_bytes());
        reply.extend_from_slice(&rkeys.slice_bytes.to_le_bytes());
        reply.extend(rkeys.keys.iter().flat_map(|key| key.to_le_bytes()));
        let connection = incoming.accept_data(protection, &reply).unwrap();
        self.connections.insert(connection.id(), connection);
    }

    /// Serves while `client` runs in another thread; returns its result.
    pub(crate) fn while_client<T: Send>(&mut self, client: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let client = scope.spawn(client);
            while !client.is_finished() {
                if !self.step() {
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
            client.join().unwrap()
        })
    }

    /// Serves until the condition is true.
    pub(crate) fn until(&mut self, mut condition: impl FnMut(&mut Self) -> bool) {
        let started = Instant::now();
        while !condition(self) {
            assert!(started.elapsed() < TEST_TIMEOUT, "the condition did not become true in time");
            if !self.step() {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    /// Connects a client with this request. Its fabric takes the region for writable, even with the
    /// request of a reader.
    pub(crate) fn client_of(
        &mut self,
        request: &[u8],
        lanes: u16,
        options: Options,
    ) -> VerbsFabric {
        let address = self.address();
        self.while_client(|| fabric_from(address, request, lanes, options, 0))
    }

    pub(crate) fn client(&mut self, lanes: u16) -> VerbsFabric {
        self.client_of(WRITER, lanes, Options::default())
    }

    /// Returns the client's and the server's end of a control channel.
    pub(crate) fn control(&mut self) -> (VerbsChannel, VerbsChannel) {
        let address = self.address();
        let (client_end, reply) =
            self.while_client(|| connect_control(address, CONTROL, &Options::default()).unwrap());
        assert!(reply.starts_with(b"hello\0"));
        self.until(|server| !server.channels.is_empty());
        (client_end, self.channels.pop_first().unwrap().1)
    }
}

/// Returns a deadline that no chain of these tests exceeds, however busy the machine is.
pub(crate) fn far_deadline(fabric: &impl Fabric) -> Nanos {
    fabric.now() + fabric.timing(REGION).lateness_max_ns + TEST_TIMEOUT.as_nanos() as Nanos
}

/// Waits for the next completion.
pub(crate) fn next(fabric: &mut impl Fabric) -> Completion {
    loop {
        match fabric.poll() {
            Some(completion) => return completion,
            None => fabric.relax(),
        }
    }
}

/// A READ of this length into the buffer for blocks.
pub(crate) fn read(remote: u64, bytes: u32) -> Verb {
    Verb::Read { remote, into: Buffer::ReadBlock, bytes }
}

/// A compare-and-swap that adds one to a word.
pub(crate) fn increment(remote: u64, expected: u64) -> Verb {
    Verb::CompareSwap { remote, expected, desired: expected + 1 }
}

/// Connects a fabric whose region seems to start `shift` bytes after its real start.
pub(crate) fn fabric_from(
    address: SocketAddr,
    request: &[u8],
    lanes: u16,
    options: Options,
    shift: u64,
) -> VerbsFabric {
    let link = connect_data(address, request, lanes, &options).unwrap();
    let remote = remote_of(link.reply(), shift);
    link.into_fabric(remote).unwrap()
}

/// The region that a server's reply describes, as if it started `shift` bytes after its real start.
pub(crate) fn remote_of(reply: &[u8], shift: u64) -> RemoteRegion {
    let word = |at: usize| u64::from_le_bytes(reply[at..at + 8].try_into().unwrap());
    let key = |at: usize| u32::from_le_bytes(reply[24 + 4 * at..][..4].try_into().unwrap());
    let keys: [u32; SLICES_MAX] = std::array::from_fn(key);
    RemoteRegion {
        base_address: word(0) + shift,
        region_bytes: word(8),
        rkeys: Rkeys { slice_bytes: word(16), keys },
        writable: true,
        round_trip_min_ns: 500,
    }
}
