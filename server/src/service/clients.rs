//! The connected clients: their ids, and their leases in the region's client table.

use std::sync::Arc;

use farside_control::Refusal;
use farside_fabric::ChainError;
use farside_fabric::memory::Region;
use farside_layout::{CLIENT_IDS, Geometry};

/// The state of a client id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IdState {
    Free,
    Connected,
    /// Its client is fenced, but slots of the index may still belong to it.
    Fenced,
}

/// The client table. An id is reused only when no slot belongs to its former client any more.
pub(crate) struct Clients {
    region: Arc<Region>,
    geometry: Geometry,
    ids: Vec<IdState>,
    /// The number of connected clients, and the limit on it.
    pub(crate) connected: u32,
    pub(crate) clients_max: u32,
    last_id: u16,
    incarnation: u64,
    /// How many clients have had each id. Each id has a count of its own, because a lease is
    /// compared only with leases of the same id. So the ids last for 2^42 clients.
    admitted: Vec<u32>,
}

impl Clients {
    pub(crate) fn new(
        region: &Arc<Region>,
        geometry: Geometry,
        incarnation: u64,
        clients_max: u32,
    ) -> Self {
        Self {
            region: region.clone(),
            geometry,
            ids: vec![IdState::Free; CLIENT_IDS as usize],
            connected: 0,
            clients_max,
            last_id: 0,
            incarnation,
            admitted: vec![0; CLIENT_IDS as usize],
        }
    }

    /// Returns an id and a lease for a new client, and writes the lease to the client table.
    pub(crate) fn admit(&mut self) -> Result<(u16, u64), Refusal> {
        let full = Refusal::Full { clients: self.connected.into() };
        if self.connected >= self.clients_max {
            return Err(full);
        }
        // Takes the ids in turn, so that an id is reused as late as possible. No client has the id
        // 0.
        let ids = CLIENT_IDS as u16;
        let mut next_ids = (1..=ids).map(|step| (self.last_id + step) % ids).filter(|id| *id != 0);
        let is_free = |id: usize| self.ids[id] == IdState::Free && self.admitted[id] < u32::MAX;
        let id = next_ids.find(|id| is_free(usize::from(*id))).ok_or(full)?;
        // The lease is unique among the leases of an id, because the server's incarnation or the
        // count differs.
        self.admitted[usize::from(id)] += 1;
        let lease = self.incarnation << 32 | u64::from(self.admitted[usize::from(id)]);
        self.set_lease(id, lease).map_err(|_| full)?;
        self.ids[usize::from(id)] = IdState::Connected;
        self.last_id = id;
        self.connected += 1;
        Ok((id, lease))
    }

    /// Fences a client: clears its lease. The id is not reused before [`Clients::forget`].
    pub(crate) fn fence(&mut self, id: u16) -> Result<(), ChainError> {
        self.set_lease(id, 0)?;
        if self.ids[usize::from(id)] == IdState::Connected {
            self.connected -= 1;
        }
        self.ids[usize::from(id)] = IdState::Fenced;
        Ok(())
    }

    /// Frees the id of a fenced client, when no slot belongs to it any more.
    pub(crate) fn forget(&mut self, id: u16) {
        debug_assert_eq!(self.ids[usize::from(id)], IdState::Fenced);
        self.ids[usize::from(id)] = IdState::Free;
    }

    fn set_lease(&self, id: u16, lease: u64) -> Result<(), ChainError> {
        let outside = ChainError::Outside { remote: id.into(), bytes: 64 };
        let entry = self.geometry.client_entry(id).ok_or(outside)?;
        self.region.store(entry, lease)
    }
}

#[cfg(test)]
mod tests {
    use farside_config::ServerConfig;
    use farside_fabric::memory::{HugePages, RegionMemory};

    use super::*;

    /// Returns the table of the third server of a region. It admits two clients.
    fn clients() -> Clients {
        let memory = RegionMemory::anonymous(8 << 20, HugePages::Never).unwrap();
        let format = ServerConfig::default().format(8 << 20, [0; 16], [0; 16]);
        Clients::new(&memory.region, format.geometry(), 3, 2)
    }

    #[test]
    fn ids_and_leases_are_not_reused_too_early() {
        let mut clients = clients();
        let (first, lease) = clients.admit().unwrap();
        assert_eq!((first, lease), (1, 3 << 32 | 1));
        let entry = clients.geometry.client_entry(first).unwrap();
        assert_eq!(clients.region.load(entry).unwrap(), lease);
        let (second, _) = clients.admit().unwrap();
        assert_ne!(first, second);
        assert_eq!(clients.admit(), Err(Refusal::Full { clients: 2 }));
        clients.fence(first).unwrap();
        assert_eq!(clients.region.load(entry).unwrap(), 0);
        let mut seen = vec![(first, lease)];
        // Admits twice as many clients as there are ids. The ids of the fenced and of the connected
        // client are not reused.
        for _ in 0..2 * CLIENT_IDS {
            let (id, lease) = clients.admit().unwrap();
            assert!(id != 0 && id != first && id != second);
            assert!(!seen.contains(&(id, lease)));
            seen.push((id, lease));
            clients.fence(id).unwrap();
            clients.forget(id);
        }
        clients.forget(first);
        assert!((0..CLIENT_IDS).any(|_| {
            let (id, _) = clients.admit().unwrap();
            clients.fence(id).unwrap();
            clients.forget(id);
            id == first
        }));
        assert_eq!(clients.connected, 1);
    }

    /// Each id needs a count of its own: a client that reconnected in a loop used up one shared
    /// count in some days.
    #[test]
    fn an_id_whose_count_is_used_up_is_skipped() {
        let mut clients = clients();
        clients.admitted[1] = u32::MAX - 1;
        let mut admit_and_forget = || {
            let (id, lease) = clients.admit().unwrap();
            clients.fence(id).unwrap();
            clients.forget(id);
            (id, lease)
        };
        assert_eq!(admit_and_forget(), (1, 3 << 32 | u64::from(u32::MAX)));
        // Enough clients to use each of the other ids, and two of them twice.
        let next: Vec<_> = (0..CLIENT_IDS).map(|_| admit_and_forget()).collect();
        assert!(next.iter().all(|(id, lease)| *id != 1 && lease >> 32 == 3));
    }
}
