//! Sessions: one thread's access to the store.

use std::ffi::{CString, c_char};
use std::sync::{Arc, Mutex, PoisonError};

use client::Session;

use crate::connect::farside_client;
use crate::error::{Failure, run, run_alone};
use crate::farside_status::{self, FARSIDE_OK};
use crate::fork::Health;
use crate::memory::{set, shared};

/// One thread's access to the store. Every call waits until its operation has completed.
pub struct farside_session {
    /// Not here while a pipeline has it. In a box, because the pipeline borrows it.
    session: Option<Box<Session>>,
    /// Where the pipeline puts it when it is closed.
    returned: Returned,
    error: CString,
    health: Health,
}

/// Where a pipeline puts its session. If the session was closed before, it is dropped with this.
pub(crate) type Returned = Arc<Mutex<Option<Box<Session>>>>;

impl farside_session {
    /// The session, unless a pipeline has it.
    #[inline]
    fn session(&mut self) -> Result<&mut Session, Failure> {
        if self.session.is_none() {
            self.session = self.returned.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
        let none = || Failure::argument("the session has an open pipeline: close it first");
        self.session.as_deref_mut().ok_or_else(none)
    }

    /// Hands the session over to a pipeline.
    pub(crate) fn lend(&mut self) -> Result<(Box<Session>, Returned), Failure> {
        self.session()?;
        let session = self.session.take().ok_or_else(|| Failure::argument("no session"))?;
        Ok((session, self.returned.clone()))
    }
}

/// Opens a session. Close it with farside_session_close().
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_session_open(
    client: *const farside_client,
    session: *mut *mut farside_session,
) -> farside_status {
    run_alone(|| {
        // SAFETY: by the caller's promise.
        unsafe { set(session, "session", std::ptr::null_mut()) }?;
        // SAFETY: likewise.
        let client = unsafe { shared(client, "client") }?;
        client.process.check()?;
        let opened = farside_session {
            session: Some(Box::new(client.client.session()?)),
            returned: Returned::default(),
            error: CString::default(),
            health: Health::new(),
        };
        // SAFETY: likewise.
        unsafe { set(session, "session", Box::into_raw(Box::new(opened))) }?;
        Ok(FARSIDE_OK)
    })
}

/// Closes a session. NULL is allowed. Its pipeline may be closed later. In a child of fork(), the
/// session of the parent is only forgotten: its memory and descriptors stay.
///
/// # Safety
/// `session` is from farside_session_open(), and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_session_close(session: *mut farside_session) {
    if session.is_null() {
        return;
    }
    // SAFETY: by the caller's promise.
    let session = unsafe { Box::from_raw(session) };
    run_alone(|| {
        let process = session.health.process;
        process.drop(*session);
        Ok(FARSIDE_OK)
    });
}

/// Returns the text of the session's last error. Valid until its next error; empty if there was
/// none.
///
/// # Safety
/// `session` is valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_session_error(session: *const farside_session) -> *const c_char {
    // SAFETY: by the caller's promise.
    unsafe { session.as_ref() }
        .map_or(c"session is NULL".as_ptr(), |session| session.error.as_ptr())
}

/// Calls a function with the object of a session, and keeps the text of its error there.
///
/// # Safety
/// `session` is NULL or valid, and only this call uses it.
#[inline]
pub(crate) unsafe fn with_session(
    session: *mut farside_session,
    call: impl FnOnce(&mut farside_session) -> Result<farside_status, Failure>,
) -> farside_status {
    // SAFETY: by the caller's promise.
    match unsafe { session.as_mut() } {
        None => run_alone(|| Err(Failure::argument("session is NULL"))),
        Some(session) => {
            let ended = run(|| {
                session.health.check()?;
                call(session)
            });
            session.health.note(&ended);
            if let Some(error) = ended.error {
                session.error = error;
            }
            ended.status
        }
    }
}

/// [`with_session`] for a call on the library's session.
///
/// # Safety
/// `session` is NULL or valid, and only this call uses it.
#[inline]
pub(crate) unsafe fn on_session(
    session: *mut farside_session,
    call: impl FnOnce(&mut Session) -> Result<farside_status, Failure>,
) -> farside_status {
    // SAFETY: by the caller's promise.
    unsafe { with_session(session, |session| call(session.session()?)) }
}
