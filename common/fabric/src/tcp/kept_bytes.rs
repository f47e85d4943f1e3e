//! The memory that sessions keep for bytes that wait: for more of a request, for their turn, or for
//! room in the socket. Clients that take no replies could fill the server's memory with them, so
//! their sum has limits: for each client, and for all.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use super::stream::Stream;
use crate::rdma::ConnectionId;

/// One client may keep this part of what all may keep.
const CLIENT_DIVISOR: usize = 4;

/// What all sessions of a server keep.
pub(super) struct KeptBytes {
    max: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    total: usize,
    /// By the offset of their leases.
    clients: BTreeMap<u64, Client>,
}

#[derive(Default)]
struct Client {
    bytes: usize,
    sessions: BTreeMap<u64, (usize, Arc<OwnedFd>)>,
}

impl State {
    /// Notes what a session keeps now. Returns the sum of its client.
    fn set(&mut self, client: u64, id: ConnectionId, kept: Option<(usize, Arc<OwnedFd>)>) -> usize {
        let of_client = self.clients.entry(client).or_default();
        let bytes = kept.as_ref().map_or(0, |(bytes, _)| *bytes);
        let before = match kept {
            Some(kept) => of_client.sessions.insert(id.0, kept),
            None => of_client.sessions.remove(&id.0),
        };
        let before = before.map_or(0, |(bytes, _)| bytes);
        of_client.bytes = of_client.bytes + bytes - before;
        self.total = self.total + bytes - before;
        let sum = of_client.bytes;
        if of_client.sessions.is_empty() {
            self.clients.remove(&client);
        }
        sum
    }

    /// Forgets the session that keeps most, of the client that keeps most, and returns it.
    fn take_largest(&mut self) -> Option<(ConnectionId, Arc<OwnedFd>)> {
        let (client, of_client) = self.clients.iter().max_by_key(|(_, client)| client.bytes)?;
        let (id, (_, socket)) = of_client.sessions.iter().max_by_key(|(_, (bytes, _))| *bytes)?;
        let (client, id, socket) = (*client, ConnectionId(*id), socket.clone());
        self.set(client, id, None);
        Some((id, socket))
    }
}

impl KeptBytes {
    pub(super) fn new(max: usize) -> Self {
        Self { max, state: Mutex::default() }
    }

    /// Notes how many bytes a session keeps. Returns false if it has to end, because its client
    /// keeps too many. If all together do, ends a session of the client that keeps most.
    pub(super) fn note(
        &self,
        client: u64,
        id: ConnectionId,
        socket: &Arc<OwnedFd>,
        bytes: usize,
    ) -> bool {
        // A panic leaves no sum half changed.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = (bytes > 0).then(|| (bytes, socket.clone()));
        if state.set(client, id, kept) > self.max / CLIENT_DIVISOR {
            return false;
        }
        while state.total > self.max {
            let Some((largest, socket)) = state.take_largest() else { break };
            if largest == id {
                return false;
            }
            // Its thread sees the end.
            Stream::shut_down(&socket);
        }
        true
    }

    /// The sum of all sessions.
    #[cfg(test)]
    pub(super) fn total(&self) -> usize {
        self.state.lock().unwrap().total
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A socket, and its peer, which sees its end.
    fn socket() -> (Arc<OwnedFd>, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        (Arc::new(near.into()), far)
    }

    fn has_ended(far: &mut UnixStream) -> bool {
        matches!(far.read(&mut [0]), Ok(0))
    }

    #[test]
    fn a_client_that_keeps_too_much_loses_the_session_that_grows() {
        let kept = KeptBytes::new(4000);
        let (socket, _far) = socket();
        let note = |id, bytes| kept.note(64, ConnectionId(id), &socket, bytes);
        assert!(note(1, 600) && note(2, 400) && note(1, 500));
        assert!(!note(2, 501) && note(2, 0) && note(1, 1000));
        assert_eq!(kept.total(), 1000);
        assert!(note(1, 0) && kept.state.lock().unwrap().clients.is_empty());
    }

    #[test]
    fn the_client_that_keeps_most_loses_its_largest_session_when_all_keep_too_much() {
        let kept = KeptBytes::new(4000);
        let mut ends: Vec<_> = (0..6).map(|_| socket()).collect();
        let sizes = [700, 300, 900, 900, 900, 300];
        for (number, bytes) in sizes.into_iter().enumerate() {
            // The first two are of one client, which keeps most.
            let client = number.max(1) as u64;
            let id = ConnectionId(number as u64);
            assert!(kept.note(client, id, &ends[number].0, bytes), "{number}");
        }
        assert_eq!(kept.total(), 4000);
        assert!(kept.note(5, ConnectionId(5), &ends[5].0, 400));
        let ended: Vec<_> = ends.iter_mut().map(|(_, far)| has_ended(far)).collect();
        assert_eq!(ended, [true, false, false, false, false, false]);
        assert_eq!(kept.total(), 3400);
        // What it keeps in the end counts no more.
        assert!(kept.note(1, ConnectionId(0), &ends[0].0, 0));
        assert_eq!(kept.total(), 3400);
    }
}
