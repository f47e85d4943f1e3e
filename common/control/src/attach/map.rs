//! Fetching the map of a cluster from one of its servers.

use std::time::{Duration, Instant};

use super::{ConnectOptions, Result, shm, tcp};
use crate::address::Address;
use crate::cluster::ClusterMap;
use crate::{ControlChannel, ControlError, Request, ServerMessage, Welcome};

/// A map, the channel through which it came, and the server's shard with the number of its view, if
/// it serves one.
pub type FetchedMap = (ClusterMap, Box<dyn ControlChannel>, Option<(u16, u64)>);

impl ConnectOptions {
    /// Makes one attempt to connect at each address, within this timeout, and fetches the map of
    /// the server's cluster. The server sends the map again through the channel when it changes.
    ///
    /// # Errors
    /// [`ConnectError`](super::ConnectError), of the last address; `Refused` with
    /// [`Refusal::NoCluster`](crate::Refusal::NoCluster) if the server is a part of no cluster.
    pub fn fetch_map(&self, timeout: Duration) -> Result<(ClusterMap, Box<dyn ControlChannel>)> {
        self.fetch_map_and_view(timeout).map(|(map, channel, _)| (map, channel))
    }

    /// As [`ConnectOptions::fetch_map`]. Also returns the view that the server serves, and its
    /// shard.
    ///
    /// # Errors
    /// Those of [`ConnectOptions::fetch_map`].
    pub fn fetch_map_and_view(&self, timeout: Duration) -> Result<FetchedMap> {
        self.at_each_address(timeout, Self::fetch_map_at_address)
    }

    fn fetch_map_at_address(&self, timeout: Duration) -> Result<FetchedMap> {
        let started = Instant::now();
        let (mut channel, welcome) = self.map_channel(timeout)?;
        if !welcome.is_for_map() {
            let (field, value) = ("client id", welcome.client_id.into());
            return Err(ControlError::Unknown { field, value }.into());
        }
        let mut request = Vec::new();
        Request::Map.encode(&mut request);
        self.send(&mut *channel, &request, started)?;
        let answer = self.receive(&mut *channel, (started, timeout))?;
        match ServerMessage::decode(&answer)? {
            ServerMessage::Map { map } => {
                let view = (welcome.shard, welcome.view_number);
                let own = (welcome.view_number > 0).then_some(view);
                Ok((ClusterMap::decode(&map)?, channel, own))
            }
            _ => Err(ControlError::NotFarside.into()),
        }
    }

    /// Connects for the map. Returns the channel and the server's welcome.
    fn map_channel(&self, timeout: Duration) -> Result<(Box<dyn ControlChannel>, Welcome)> {
        match &self.address {
            Address::Shm(path) => shm::map_channel(self, path, timeout),
            Address::Tcp { .. } => tcp::map_channel(self, timeout),
            #[cfg(feature = "verbs")]
            Address::Rdma { .. } => super::verbs::map_channel(self, timeout),
            #[cfg(not(feature = "verbs"))]
            Address::Rdma { .. } => Err(farside_fabric::rdma::VerbsError::NotBuilt.into()),
        }
    }
}
