//! Two hosts and the cable between them, on one machine: the test's own network namespace and that
//! of a server, joined by a veth pair. Needs root and `ip`.
//!
//! The cable can be pulled and plugged in, and packets can be lost, delayed and reordered. No
//! packet leaves the machine: if the route over the cable is gone, another one refuses all packets.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The number of networks that exist at once at most: 10.77.0.0/16 has as many parts of four
/// addresses, and so has 10.78.0.0/16.
const NETWORKS_MAX: u32 = 1 << 14;
/// Where `ip` keeps the names of namespaces.
const NAMESPACES: &str = "/run/netns";
/// The name of a namespace: this, the number of the network, and the process that made it.
const NAME: &str = "farside-";
/// A hardware address that no interface has.
const NO_INTERFACE: &str = "02:00:00:00:00:00";

/// What packets are for. Each host has an address for either, so that the packets of one can be
/// lost alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// Between clients on the test's host and a server.
    Clients,
    /// Between a server of a cluster and the store of the records on the test's host.
    Records,
}

impl Traffic {
    /// All of it.
    pub const ALL: [Self; 2] = [Self::Clients, Self::Records];
}

/// A network of two hosts. It is removed when this is dropped.
///
/// A failure lasts until [`Network::plug_in`].
pub struct Network {
    number: u32,
    namespace: String,
}

/// Runs `ip` or `tc`. Returns what it printed, or the reason why it failed.
fn run(program: &str, arguments: &str) -> Result<String, String> {
    let output = Command::new(program).args(arguments.split_whitespace()).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let error = String::from_utf8_lossy(&output.stderr);
    Err(format!("{program} {arguments}: {}", error.lines().next().unwrap_or_default()))
}

/// Returns a command that runs a program by another one, such as `ip netns exec NAME`, whose words
/// these are. The program replaces the other one, so that it has the process id of the child.
pub(crate) fn command_by(words: &[String], program: impl AsRef<OsStr>) -> Command {
    let [first, rest @ ..] = words else { return Command::new(program) };
    let mut command = Command::new(first);
    command.args(rest).arg(program);
    command
}

/// Removes what networks of processes that were killed have left.
fn remove_left_behind() {
    let names = std::fs::read_dir(NAMESPACES).into_iter().flatten().flatten();
    for name in names.filter_map(|entry| entry.file_name().into_string().ok()) {
        let parts = name.strip_prefix(NAME).and_then(|parts| parts.split_once('-'));
        if let Some((number, process)) = parts
            && let Ok(number) = number.parse()
            && !Path::new("/proc").join(process).exists()
        {
            drop(Network { number, namespace: name });
        }
    }
}

impl Network {
    /// An address at which a server on its host is reached from that host.
    pub const LOCAL_ADDRESS: &'static str = "tcp://127.0.0.1:7400";

    /// Makes a network, whose cable is plugged in.
    ///
    /// # Errors
    /// The reason why the system cannot make it.
    pub fn new() -> Result<Self, String> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        remove_left_behind();
        let process = std::process::id();
        loop {
            let made = MADE.fetch_add(1, Ordering::Relaxed);
            let number = (process.wrapping_mul(97).wrapping_add(made)) % NETWORKS_MAX;
            let namespace = format!("{NAME}{number}-{process}");
            // The interface claims the number.
            let pair = format!("link add farside-{number} type veth peer name server-{number}");
            match run("ip", &pair) {
                Ok(_) => {
                    let network = Self { number, namespace };
                    network.set_up()?;
                    return Ok(network);
                }
                Err(error) if error.contains("File exists") && made < NETWORKS_MAX => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn set_up(&self) -> Result<(), String> {
        let Self { number, .. } = self;
        for traffic in Traffic::ALL {
            let [network, own, _] = self.addresses(traffic);
            run("ip", &format!("route add unreachable {network}/30 metric 4000000000"))?;
            run("ip", &format!("addr add {own}/30 dev farside-{number}"))?;
        }
        run("ip", &format!("link set farside-{number} up"))?;
        self.set_up_server_host()?;
        self.run_there("ip", &format!("link set server-{number} up")).map(drop)
    }

    /// Makes the namespace of the server, and gives it its end of the cable, which is down.
    fn set_up_server_host(&self) -> Result<(), String> {
        let Self { number, namespace } = self;
        run("ip", &format!("netns add {namespace}"))?;
        run("ip", &format!("link set server-{number} netns {namespace}"))?;
        self.run_there("ip", "link set lo up")?;
        for traffic in Traffic::ALL {
            let [_, _, server] = self.addresses(traffic);
            // An address of an interface that is down is none of the host's. A server that starts
            // while the cable is out needs it.
            self.run_there("ip", &format!("addr add {server}/32 dev lo"))?;
            self.run_there("ip", &format!("addr add {server}/30 dev server-{number}"))?;
        }
        Ok(())
    }

    /// Runs `ip` or `tc` for the server's host.
    fn run_there(&self, program: &str, arguments: &str) -> Result<String, String> {
        run(program, &format!("-netns {} {arguments}", self.namespace))
    }

    /// The address of the network, of the test's host and of the server's.
    fn addresses(&self, traffic: Traffic) -> [String; 3] {
        let first = self.number * 4;
        let of = if traffic == Traffic::Clients { 77 } else { 78 };
        [0, 1, 2].map(|host| format!("10.{of}.{}.{}", first >> 8, (first & 0xff) + host))
    }

    /// Returns the words before a command that runs on the server's host.
    pub(crate) fn on_host(&self) -> Vec<String> {
        ["ip", "netns", "exec", &self.namespace].map(str::to_owned).into()
    }

    /// Returns the address at which a server is reached from the test.
    pub fn server_address(&self) -> String {
        self.server_address_at(7400)
    }

    /// Returns the same with another port.
    pub fn server_address_at(&self, port: u16) -> String {
        format!("tcp://{}:{port}", self.addresses(Traffic::Clients)[2])
    }

    /// Returns the address at which the server's host reaches a store of records on the test's.
    pub fn records_host(&self) -> String {
        let [_, own, _] = self.addresses(Traffic::Records);
        own
    }

    /// Interrupts the network. The test's host sees an interface without a link, and the server's
    /// host has no interface.
    pub fn pull_cable(&self) {
        self.run_there("ip", &format!("link set server-{} down", self.number)).unwrap();
    }

    /// As [`Network::pull_cable`], with the hosts exchanged.
    pub fn pull_cable_here(&self) {
        run("ip", &format!("link set farside-{} down", self.number)).unwrap();
    }

    /// Loses all packets. Neither host sees a reason, as when a switch between them has failed.
    pub fn lose_packets(&self) {
        Traffic::ALL.into_iter().for_each(|traffic| self.lose_packets_of(traffic));
    }

    /// Loses all packets of one kind.
    pub fn lose_packets_of(&self, traffic: Traffic) {
        let (number, [_, own, server]) = (self.number, self.addresses(traffic));
        let replace = |address: &str, interface: &str| {
            format!("neigh replace {address} lladdr {NO_INTERFACE} dev {interface} nud permanent")
        };
        run("ip", &replace(&server, &format!("farside-{number}"))).unwrap();
        self.run_there("ip", &replace(&own, &format!("server-{number}"))).unwrap();
    }

    /// Ends what the functions above did.
    pub fn plug_in(&self) {
        let number = self.number;
        run("ip", &format!("link set farside-{number} up")).unwrap();
        self.run_there("ip", &format!("link set server-{number} up")).unwrap();
        for traffic in Traffic::ALL {
            let [_, own, server] = self.addresses(traffic);
            // They fail if there is no such entry.
            let _ = run("ip", &format!("neigh del {server} dev farside-{number}"));
            let _ = self.run_there("ip", &format!("neigh del {own} dev server-{number}"));
        }
    }

    /// Has both ends delay, lose or reorder what they send, as `tc-netem` describes:
    /// `delay 2ms 1ms loss 1% reorder 5%`.
    ///
    /// # Errors
    /// The kernel has no netem.
    pub fn degrade(&self, how: &str) -> Result<(), String> {
        let netem = |end: &str| format!("qdisc replace dev {end}-{} root netem {how}", self.number);
        run("tc", &netem("farside"))?;
        self.run_there("tc", &netem("server")).map(drop)
    }

    /// Replaces the server's host by one without any connections, as a loss of power does. The
    /// cable is out afterwards. No server may run there.
    pub fn restart_server_host(&self) {
        let Self { number, namespace } = self;
        // Sockets without a process can keep the old host alive, so its end of the cable leaves it.
        let move_out = format!("link set server-{number} netns {}", std::process::id());
        self.run_there("ip", &move_out).unwrap();
        run("ip", &format!("netns del {namespace}")).unwrap();
        self.set_up_server_host().unwrap();
    }

    /// Removes the cable and both of its ends for good.
    pub fn vanish(&self) {
        run("ip", &format!("link del farside-{}", self.number)).unwrap();
    }

    /// Runs `work` on a thread on the server's host.
    pub fn on_server_host<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let namespace = format!("{NAMESPACES}/{}", self.namespace);
        let move_and_work = || {
            let namespace = File::open(namespace).unwrap();
            // The system call moves only this thread, not the process.
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(namespace.as_fd(), kind).unwrap();
            work()
        };
        std::thread::scope(|scope| scope.spawn(move_and_work).join().unwrap())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // Each fails if it is gone.
        let _ = run("ip", &format!("link del farside-{}", self.number));
        for traffic in Traffic::ALL {
            let [network, ..] = self.addresses(traffic);
            let _ = run("ip", &format!("route del unreachable {network}/30 metric 4000000000"));
        }
        let _ = run("ip", &format!("netns del {}", self.namespace));
    }
}
