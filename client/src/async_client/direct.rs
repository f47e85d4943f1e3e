//! GETs without the driver. On shared memory this process executes the verbs itself. So a task that
//! asks for a cached location READs the value in its own poll, in less time than a handover takes.
//!
//! A direct GET never waits: if one READ does not answer it, the driver runs it.

use std::num::NonZero;
use std::sync::{Arc, Mutex, PoisonError};

use farside_protocol::Version;

use crate::Session;
use crate::client_inner::ClientInner;

/// Limit on the direct sessions. Each serves one thread at a time.
const SESSIONS_MAX: usize = 8;
/// One of so many GETs lets other tasks run first: a task that only READs would never yield.
const GETS_PER_YIELD: u32 = 128;

/// The sessions of direct GETs: none over RDMA.
pub(super) struct DirectSessions(Box<[Mutex<DirectSession>]>);

#[derive(Default)]
struct DirectSession {
    session: Option<Session>,
    gets: u32,
}

/// The result of a direct GET.
pub(super) enum DirectGet {
    /// The value was found, and appended to the caller's buffer.
    Found(Version),
    /// It is the turn of another task.
    Yield,
    /// The driver has to run the GET.
    Unanswered,
}

impl DirectSessions {
    /// As many closed sessions as there are processors.
    pub(super) fn new() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        Self((0..processors.min(SESSIONS_MAX)).map(|_| Mutex::default()).collect())
    }

    /// GETs a value, if no more than a READ of its cached location is needed.
    #[inline]
    pub(super) fn get(&self, key: &[u8], value: &mut Vec<u8>) -> DirectGet {
        let free = self.0.iter().find_map(|direct| direct.try_lock().ok());
        let Some(mut direct) = free else { return DirectGet::Unanswered };
        let DirectSession { session: Some(session), gets } = &mut *direct else {
            return DirectGet::Unanswered;
        };
        *gets = gets.wrapping_add(1);
        if gets.is_multiple_of(GETS_PER_YIELD) {
            return DirectGet::Yield;
        }
        session.get_at_once(key, value).map_or(DirectGet::Unanswered, DirectGet::Found)
    }

    /// Opens the sessions that are closed or have lost their connection. Those that cannot be
    /// opened stay closed.
    pub(super) fn open(&self, client: &Arc<ClientInner>) {
        for direct in &self.0 {
            let lock = || direct.lock().unwrap_or_else(PoisonError::into_inner);
            if lock().session.as_ref().is_some_and(|session| !session.is_lost()) {
                continue;
            }
            // Opening and dropping a session can wait, so the lock is not held meanwhile.
            let opened = Session::open(client.clone()).ok();
            let is_open = opened.is_some();
            let former = std::mem::replace(&mut lock().session, opened);
            drop(former);
            if !is_open {
                return;
            }
        }
    }

    /// Closes the sessions.
    pub(super) fn close(&self) {
        for direct in &self.0 {
            let session = direct.lock().unwrap_or_else(PoisonError::into_inner).session.take();
            drop(session);
        }
    }
}
