//! The report of `kv-cli doctor` on RDMA: the machine's devices, and their faults with remedies.
//! It is read from sysfs, which takes no library. A build with verbs adds the devices' own answers.

use std::fmt;
use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use rustix::fs::{Access, access};
use rustix::process::{Resource, getrlimit};

const SYSFS: &str = "/sys/class/infiniband";
/// RDMA-CM's device file, and the folder of the verbs' device files.
const CM_DEVICE: &str = "/dev/infiniband/rdma_cm";
const VERBS_DEVICES: &str = "/dev/infiniband";
/// The limit on pinned memory that suffices for a region of the default size. Its server registers
/// it twice, once for each role. A client registers less.
const MEMLOCK_BYTES_MIN: u64 = 2 << 30;
/// Entries of a port's GID table after this one are not read.
const GIDS_MAX: usize = 256;

/// All devices, and all faults that were found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The devices, by name.
    pub devices: Vec<Device>,
    /// How much memory this process may pin, in bytes; `None` for any amount.
    pub memlock_bytes: Option<u64>,
    /// The faults; empty if connections should work.
    pub findings: Vec<Finding>,
}

/// A fault and its remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The fault.
    pub what: String,
    /// The command, or the setting, that mends it.
    pub mend: String,
}

/// An RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The device's name, such as `mlx5_0`.
    pub name: String,
    /// The device's ports.
    pub ports: Vec<Port>,
    /// The device's answer, if it could be asked.
    pub capabilities: Option<Capabilities>,
}

/// The capabilities of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Whether the device has atomic operations.
    pub atomics: bool,
    /// The peer's READs and atomics that a queue pair can have in flight.
    pub max_qp_rd_atom: u32,
    /// The READs and atomics of this host that a queue pair can have in flight.
    pub max_qp_init_rd_atom: u32,
    /// The longest memory that can be registered as one region.
    pub max_mr_bytes: u64,
}

/// A port of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// The port's number, from 1 on.
    pub number: u8,
    /// The port's state, such as `ACTIVE`.
    pub state: String,
    /// The link layer: `Ethernet` or `InfiniBand`.
    pub link_layer: String,
    /// The longest packet, if the device could be asked.
    pub mtu_bytes: Option<u32>,
    /// The port's addresses.
    pub gids: Vec<Gid>,
}

/// An address of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gid {
    /// The index in the port's table.
    pub index: usize,
    /// The address, as sysfs writes it.
    pub address: String,
    /// The kind of address: `RoCE v2`, or `IB/RoCE v1`.
    pub kind: String,
}

impl Gid {
    fn ipv4_address(&self) -> Option<IpAddr> {
        let address: Ipv6Addr = self.address.parse().ok()?;
        address.to_ipv4_mapped().map(IpAddr::V4)
    }
}

impl Report {
    /// The devices, as sysfs describes them.
    pub(super) fn from_sysfs() -> Self {
        let root = Path::new(SYSFS);
        let device = |name: String| Device {
            ports: ports(&root.join(&name).join("ports")),
            name,
            capabilities: None,
        };
        Self {
            devices: names(root).into_iter().map(device).collect(),
            memlock_bytes: getrlimit(Resource::Memlock).current,
            findings: Vec::new(),
        }
    }

    /// The IPv4 addresses of the devices, each with the device's name.
    pub fn addresses(&self) -> impl Iterator<Item = (&str, IpAddr)> {
        self.devices.iter().flat_map(|device| {
            let gids = device.ports.iter().flat_map(|port| &port.gids);
            gids.filter_map(|gid| Some((device.name.as_str(), gid.ipv4_address()?)))
        })
    }

    /// Whether a process may pin as much as the server of a region of the default size.
    pub fn memlock_suffices(&self) -> bool {
        self.memlock_bytes.is_none_or(|bytes| bytes >= MEMLOCK_BYTES_MIN)
    }

    /// Adds the faults of this machine, and their remedies.
    pub(super) fn judge(mut self) -> Self {
        let mut findings = Vec::new();
        let mut found = |what: String, mend: &str| {
            findings.push(Finding { what, mend: mend.to_owned() });
        };
        if self.devices.is_empty() {
            found(
                "no RDMA device".to_owned(),
                "load the network card's driver; or soft-RoCE: modprobe rdma_rxe && rdma link add \
                 rxe0 type rxe netdev eth0 (shm:// needs none)",
            );
        } else if let Some(what) = refused_device() {
            found(
                what,
                "modprobe ib_uverbs rdma_ucm; usermod -aG rdma $USER; in a container pass \
                 /dev/infiniband in",
            );
        }
        for device in &self.devices {
            let name = &device.name;
            let is_active = |port: &&Port| port.state == "ACTIVE";
            let active: Vec<_> = device.ports.iter().filter(is_active).collect();
            if active.is_empty() {
                let what = format!("{name} has no active port");
                found(what, "bring its network interface up: ip link set <interface> up");
            }
            for port in active.iter().filter(|port| port.link_layer == "Ethernet") {
                if !port.gids.iter().any(|gid| gid.kind.contains("v2")) {
                    let what = format!("{name} port {} has no RoCE v2 address", port.number);
                    found(what, "give its network interface an IP address");
                }
            }
            if device.capabilities.is_some_and(|capabilities| !capabilities.atomics) {
                let what = format!("{name} has no atomic operations");
                found(what, "use another device; Farside needs compare-and-swap");
            }
        }
        if !self.memlock_suffices() {
            let bytes = self.memlock_bytes.unwrap_or(0);
            found(
                format!("only {bytes} bytes of locked memory are allowed (without CAP_IPC_LOCK)"),
                "ulimit -l unlimited, LimitMEMLOCK=infinity in the systemd unit, or memlock in \
                 /etc/security/limits.conf (shm:// does not need it)",
            );
        }
        self.findings = findings;
        self
    }
}

/// The first device file that this process may not use, with the system's error.
fn refused_device() -> Option<String> {
    let verbs = names(Path::new(VERBS_DEVICES)).into_iter().find(|name| name.starts_with("uverbs"));
    let verbs = verbs.unwrap_or_else(|| "uverbs0".to_owned());
    [CM_DEVICE.to_owned(), format!("{VERBS_DEVICES}/{verbs}")].into_iter().find_map(|path| {
        let error = access(&path, Access::READ_OK | Access::WRITE_OK).err()?;
        Some(format!("{path}: {error}"))
    })
}

fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<_> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

fn line(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn ports(folder: &Path) -> Vec<Port> {
    let port = |name: String| {
        let path = folder.join(&name);
        let state = line(&path.join("state"));
        Some(Port {
            number: name.parse().ok()?,
            state: state.split_once(": ").map_or(state.as_str(), |(_, name)| name).to_owned(),
            link_layer: line(&path.join("link_layer")),
            mtu_bytes: None,
            gids: gids(&path),
        })
    };
    names(folder).into_iter().filter_map(port).collect()
}

fn gids(port: &Path) -> Vec<Gid> {
    let gid = |index: usize| {
        let address = line(&port.join("gids").join(index.to_string()));
        let kind = line(&port.join("gid_attrs/types").join(index.to_string()));
        let is_set = address.contains(|c: char| c != '0' && c != ':');
        is_set.then_some(Gid { index, address, kind })
    };
    (0..GIDS_MAX).filter_map(gid).collect()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for device in &self.devices {
            writeln!(f, "{device}")?;
        }
        match self.memlock_bytes {
            Some(bytes) => write!(f, "memory that may be pinned: {bytes} bytes")?,
            None => write!(f, "memory that may be pinned: any amount")?,
        }
        for Finding { what, mend } in &self.findings {
            write!(f, "\n{what}: {mend}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.name)?;
        match &self.capabilities {
            Some(can) => write!(
                f,
                " atomics {}, {} READs in flight ({} of peers), regions up to {} bytes",
                if can.atomics { "yes" } else { "no" },
                can.max_qp_init_rd_atom,
                can.max_qp_rd_atom,
                can.max_mr_bytes
            )?,
            None => write!(f, " its capabilities are unknown")?,
        }
        for Port { number, state, link_layer, mtu_bytes, gids } in &self.ports {
            write!(f, "\n  port {number}: {state}, {link_layer}")?;
            if let Some(bytes) = mtu_bytes {
                write!(f, ", MTU {bytes}")?;
            }
            for Gid { index, address, kind } in gids {
                write!(f, "\n    GID {index}: {address} ({kind})")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(state: &str, kind: &str, atomics: bool) -> Device {
        let gid = Gid { index: 1, address: "::ffff:0a09:0001".into(), kind: kind.into() };
        let port = Port {
            number: 1,
            state: state.into(),
            link_layer: "Ethernet".into(),
            mtu_bytes: Some(1024),
            gids: vec![gid],
        };
        let capabilities = Capabilities {
            atomics,
            max_qp_rd_atom: 16,
            max_qp_init_rd_atom: 16,
            max_mr_bytes: u64::MAX,
        };
        Device { name: "rxe0".into(), ports: vec![port], capabilities: Some(capabilities) }
    }

    fn findings(device: Device, memlock_bytes: Option<u64>) -> String {
        let report = Report { devices: vec![device], memlock_bytes, findings: Vec::new() };
        report.judge().to_string()
    }

    #[test]
    fn every_finding_names_its_remedy() {
        let good = findings(device("ACTIVE", "RoCE v2", true), None);
        assert!(good.contains("rxe0") && good.contains("MTU 1024") && good.contains("GID 1"));
        assert!(!good.contains("no "), "{good}");
        let down = findings(device("DOWN", "RoCE v2", true), None);
        assert!(down.contains("no active port") && down.contains("ip link set"));
        assert!(findings(device("ACTIVE", "IB/RoCE v1", true), None).contains("IP address"));
        assert!(findings(device("ACTIVE", "RoCE v2", false), None).contains("atomic"));
        let little = findings(device("ACTIVE", "RoCE v2", true), Some(8 << 20));
        assert!(little.contains("8388608") && little.contains("ulimit -l"));
        let none = Report::default().judge().to_string();
        assert!(none.contains("rdma link add"), "{none}");
    }

    #[test]
    fn devices_have_the_addresses_of_their_gids() {
        let mut device = device("ACTIVE", "RoCE v2", true);
        let gids = &mut device.ports[0].gids;
        for address in ["fe80:0000:0000:0000:5054:00ff:fe12:3456", "", "nonsense"] {
            gids.push(Gid { address: address.into(), ..gids[0].clone() });
        }
        gids[0].address = "0000:0000:0000:0000:0000:ffff:0a09:0001".into();
        let report = Report { devices: vec![device], ..Report::default() };
        let addresses: Vec<_> = report.addresses().collect();
        assert_eq!(addresses, [("rxe0", IpAddr::from([10, 9, 0, 1]))]);
    }

    #[test]
    fn the_report_has_the_devices_of_this_machine() {
        let report = Report::from_sysfs().judge();
        assert_eq!(report.devices.is_empty(), !Path::new(SYSFS).exists());
    }
}
