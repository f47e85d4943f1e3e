//! Fetching the map of a cluster from one of its servers.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::{ConnectOptions, Contact, Result, refused, shm, system, tcp};
use crate::address::Address;
use crate::cluster::ClusterMap;
use crate::{
    ControlChannel, ControlError, MESSAGE_BYTES_MAX, Request, ServerMessage, decode_reply,
};

impl ConnectOptions {
    /// Makes one attempt to connect at each address, within this timeout, and fetches the map of
    /// the server's cluster. The server sends the map again through the channel when it changes.
    ///
    /// # Errors
    /// [`ConnectError`](super::ConnectError), of the last address; `Refused` with
    /// [`Refusal::NoCluster`](crate::Refusal::NoCluster) if the server is a part of no cluster.
    pub fn fetch_map(&self, timeout: Duration) -> Result<(ClusterMap, Box<dyn ControlChannel>)> {
        self.at_each_address(timeout, Self::fetch_map_at_address)
    }

    fn fetch_map_at_address(
        &self,
        timeout: Duration,
    ) -> Result<(ClusterMap, Box<dyn ControlChannel>)> {
        let started = Instant::now();
        let (mut channel, reply) = self.map_channel(timeout)?;
        let server = self.address.to_string();
        let welcome = decode_reply(&reply)?.map_err(|refusal| refused(&server, refusal))?;
        if !welcome.is_for_map() {
            let (field, value) = ("client id", welcome.client_id.into());
            return Err(ControlError::Unknown { field, value }.into());
        }
        let lost = |source| self.unreachable(Contact::HungUp, started.elapsed(), source);
        let mut buffer = Vec::new();
        Request::Map.encode(&mut buffer);
        channel.send(&buffer).map_err(|error| lost(Some(error)))?;
        buffer.resize(MESSAGE_BYTES_MAX, 0);
        loop {
            match channel.receive(&mut buffer).map_err(|error| lost(Some(error)))? {
                Some(0) => return Err(lost(None)),
                Some(bytes) => match ServerMessage::decode(&buffer[..bytes])? {
                    ServerMessage::Map { map } => return Ok((ClusterMap::decode(&map)?, channel)),
                    _ => return Err(ControlError::NotFarside.into()),
                },
                None => {}
            }
            let left = timeout.checked_sub(started.elapsed());
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let Some(left) = left else {
                return Err(self.unreachable(Contact::Silent, started.elapsed(), None));
            };
            match poll(&mut [PollFd::new(&channel, PollFlags::IN)], Some(&left)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(system("waiting for the map")(error.into())),
            }
        }
    }

    /// Connects for the map. Returns the channel and the server's answer.
    fn map_channel(&self, timeout: Duration) -> Result<(Box<dyn ControlChannel>, Vec<u8>)> {
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
