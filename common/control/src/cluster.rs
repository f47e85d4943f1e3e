//! The map of a cluster: which server serves each shard. Servers hand it out on the control
//! channel, and send it again when it changes.
//!
//! Each shard has a view with a number of its own, which only rises. So two maps of one cluster can
//! always be merged: of each shard the view with the higher number stays, whatever the source.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use farside_layout::hash::{KeyHash, KeyHasher};

use crate::ControlError;
use crate::address::Address;

/// Limit on the shards of a cluster. A map of so many shards fits into one message, if each server
/// has no more than three addresses of common length.
pub const SHARDS_MAX: u16 = 128;

/// The highest number of a view. A higher one is damage. It must not spread, because views with
/// right numbers could not replace it.
pub const VIEW_NUMBER_MAX: u64 = 1 << 48;

/// Sixteen random bytes that name a cluster, a server or a region; hexadecimal in texts.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Id(pub [u8; 16]);

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Id> for String {
    fn from(id: Id) -> Self {
        id.to_string()
    }
}

impl TryFrom<String> for Id {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl FromStr for Id {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_id = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        match u128::from_str_radix(text, 16) {
            Ok(number) if is_id => Ok(Self(number.to_be_bytes())),
            _ => Err("an id has 32 hexadecimal digits"),
        }
    }
}

/// A server's copy of a shard, as a client has to find it. The addresses are hints: by now they may
/// belong to another server, so the hello checks the rest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardCopy {
    /// The server process; each start has another id.
    pub server: Id,
    /// The region.
    pub region_id: Id,
    /// How many times a server had started on the region when this view was made.
    pub incarnation: u64,
    /// The addresses at which clients connect.
    pub addresses: Vec<Address>,
    /// The boot id of the server's host. Clients on another host do not use its `shm://` addresses.
    pub host: String,
}

impl ShardCopy {
    /// The addresses that this program can reach from this host, the best first.
    pub fn reachable(&self) -> impl Iterator<Item = &Address> {
        let is_here = !self.host.is_empty() && self.host == boot_id();
        let mut addresses: Vec<_> = self.addresses.iter().collect();
        addresses.retain(|address| match address {
            Address::Shm(_) => is_here,
            Address::Rdma { .. } => cfg!(feature = "verbs"),
            Address::Tcp { .. } => true,
        });
        addresses.sort_by_key(|address| address.preference());
        addresses.into_iter()
    }
}

/// The boot id of this host, which no other host has, and which it had at no time before its last
/// boot. Empty if the system does not tell.
pub fn boot_id() -> &'static str {
    static BOOT_ID: OnceLock<String> = OnceLock::new();
    BOOT_ID.get_or_init(|| {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        id.trim().to_owned()
    })
}

/// The present view of a shard.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardView {
    /// The number of the view, which rises with every change; 0 before the first server.
    pub number: u64,
    /// The copies of the shard. Today none or one.
    pub copies: Vec<ShardCopy>,
}

/// The map of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterMap {
    /// The cluster.
    pub cluster: Id,
    /// The hash key of all its regions.
    pub hash_key: Id,
    /// How long a client trusts a server after it sent a heartbeat that the server answered, in
    /// milliseconds.
    pub trust_ms: u32,
    /// The views, by shard.
    pub shards: Vec<ShardView>,
}

impl ClusterMap {
    /// Returns the map in these bytes.
    ///
    /// # Errors
    /// [`ControlError::Map`] for bytes that are no map.
    pub fn decode(bytes: &[u8]) -> Result<Self, ControlError> {
        let map: Self = serde_json::from_slice(bytes).map_err(|_| ControlError::Map)?;
        let is_valid = (1..=usize::from(SHARDS_MAX)).contains(&map.shards.len())
            && map.trust_ms > 0
            && map
                .shards
                .iter()
                .all(|view| view.copies.len() <= 1 && view.number <= VIEW_NUMBER_MAX);
        if is_valid { Ok(map) } else { Err(ControlError::Map) }
    }

    /// Returns the encoded map.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// The number of the whole map: the sum of the numbers of all views.
    pub fn number(&self) -> u64 {
        self.shards.iter().fold(0, |sum, view| sum.saturating_add(view.number))
    }

    /// Takes those views of `other` that are newer, so that numbers only rise (invariant I25).
    /// Returns whether there was one. A map of another cluster changes nothing.
    pub fn merge(&mut self, other: &Self) -> bool {
        if other.cluster != self.cluster || other.shards.len() != self.shards.len() {
            return false;
        }
        let mut has_changed = false;
        for (own, other) in self.shards.iter_mut().zip(&other.shards) {
            if other.number > own.number && other.number <= VIEW_NUMBER_MAX {
                own.clone_from(other);
                has_changed = true;
            }
        }
        has_changed
    }

    /// Returns what finds the shard of a key.
    pub fn router(&self) -> Router {
        Router { hasher: KeyHasher::new(&self.hash_key.0), shards: self.shards.len() as u64 }
    }
}

/// Finds the shard of a key.
///
/// A shard has an equal part of the range of a hash. This hash is the product of the key's
/// `identity` and an odd number: neither the directory nor the window depends on it.
#[derive(Clone, Copy, Debug)]
pub struct Router {
    /// The hash of keys, the same in all regions of the cluster.
    pub hasher: KeyHasher,
    shards: u64,
}

impl Router {
    /// A router to the only shard of a server without a cluster, whose region has this hash.
    pub fn single(hasher: KeyHasher) -> Self {
        Self { hasher, shards: 1 }
    }

    /// Returns the number of the shard of the key with this hash.
    #[inline]
    pub fn shard(&self, hash: KeyHash) -> usize {
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
        let mixed = hash.identity().wrapping_mul(ODD) >> 32;
        ((mixed * self.shards) >> 32) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(numbers: &[u64]) -> ClusterMap {
        let view = |&number| ShardView { number, copies: Vec::new() };
        let shards = numbers.iter().map(view).collect();
        ClusterMap { cluster: Id([7; 16]), hash_key: Id([9; 16]), trust_ms: 2000, shards }
    }

    #[test]
    fn merged_maps_have_the_newest_view_of_each_shard() {
        let mut known = map(&[3, 1, 0]);
        assert!(known.merge(&map(&[2, 5, 0])));
        assert_eq!(known, map(&[3, 5, 0]));
        assert!(!known.merge(&map(&[3, 4, 0])));
        let other = ClusterMap { cluster: Id([8; 16]), ..map(&[9, 9, 9]) };
        assert!(!known.merge(&other) && !known.merge(&map(&[9])));
        assert_eq!(known.number(), 8);
    }

    #[test]
    fn a_map_survives_a_message_and_no_bytes_panic() {
        let mut sent = map(&[1, 2]);
        sent.shards[1].copies.push(ShardCopy {
            server: Id([1; 16]),
            region_id: Id([2; 16]),
            incarnation: 3,
            addresses: vec!["tcp://kv-1:7400".parse().unwrap()],
            host: "boot".to_owned(),
        });
        let bytes = sent.encode();
        assert_eq!(ClusterMap::decode(&bytes).unwrap(), sent);
        for end in 0..bytes.len() {
            assert!(ClusterMap::decode(&bytes[..end]).is_err());
        }
        assert!(ClusterMap::decode(&map(&[]).encode()).is_err());
        assert!(ClusterMap::decode(&map(&[1, VIEW_NUMBER_MAX]).encode()).is_ok());
        for number in [VIEW_NUMBER_MAX + 1, u64::MAX] {
            assert!(ClusterMap::decode(&map(&[1, number]).encode()).is_err());
        }
    }

    #[test]
    fn keys_spread_over_the_shards() {
        for shards in [1_u64, 3, 16, 100] {
            let router = map(&vec![0; shards as usize]).router();
            let mut counts = vec![0_u64; shards as usize];
            let keys = 100_000 * shards.min(16);
            for key in 0..keys {
                counts[router.shard(router.hasher.hash(&key.to_le_bytes()))] += 1;
            }
            let expected = keys as f64 / shards as f64;
            let spread = 6.0 * expected.sqrt();
            assert!(counts.iter().all(|&count| (count as f64 - expected).abs() < spread));
        }
    }
}
