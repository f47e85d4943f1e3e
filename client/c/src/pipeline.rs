//! Many operations in flight, driven by the caller's thread or by one of the library.

mod queue;

use std::ffi::{CString, c_char, c_int, c_void};
use std::time::Duration;

use client::{Pipeline, PipelineFull, Session, Version};

use self::queue::Queue;
use crate::connect::farside_client;
use crate::error::{Failure, c_text, run, run_alone};
use crate::farside_status::{
    self, FARSIDE_ABSENT, FARSIDE_BUSY, FARSIDE_NONE, FARSIDE_NOT_APPLIED, FARSIDE_OK,
};
use crate::fork::Health;
use crate::memory::{bytes, set, shared, store};
use crate::operations::{How, farside_store_options, ttl_of};
use crate::session::{Returned, farside_session, with_session};

/// Many operations in flight.
pub struct farside_pipeline {
    driven: Driven,
    error: CString,
    health: Health,
}

/// The thread that drives the operations.
enum Driven {
    ByCaller(Box<Lanes>),
    ByThread(Queue),
}

/// A session's pipeline.
struct Lanes {
    /// Borrows `session`. `None` only in the drop.
    pipeline: Option<Pipeline<'static>>,
    session: *mut Session,
    returned: Returned,
    /// By lane: what its operation is.
    started: Vec<Started>,
}

/// An operation of a lane.
#[derive(Default)]
struct Started {
    is_store: bool,
    /// What the store expects. The operation refers to it.
    expected: Box<[u8]>,
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.pipeline = None;
        // SAFETY: from a box, which nothing borrows any more.
        let session = unsafe { Box::from_raw(self.session) };
        if let Ok(mut returned) = self.returned.lock() {
            *returned = Some(session);
        }
    }
}

/// A completed operation of a pipeline.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct farside_completed {
    /// The ticket that the operation got.
    pub ticket: u64,
    /// The value of a get, valid until the pipeline is used again; NULL without one.
    pub value: *const c_void,
    /// The length of the value, in bytes.
    pub value_bytes: usize,
    /// The version of the value that was found or stored; 0 if it is not known.
    pub version: u64,
    /// The sum of an increment.
    pub number: i64,
    /// A farside_status, as the function for one key returns it. The text of an error is
    /// farside_pipeline_error().
    pub status: i32,
    /// Zeros: later versions may give it a meaning.
    pub reserved: [u64; 2],
}

impl farside_completed {
    /// The operation with this ticket, without a value.
    pub(crate) fn new(ticket: u64, status: farside_status) -> Self {
        let (value, value_bytes, version, number) = (std::ptr::null(), 0, 0, 0);
        let (status, reserved) = (status as i32, [0; 2]);
        Self { ticket, value, value_bytes, version, number, status, reserved }
    }
}

/// The status of an operation without an error.
pub(crate) fn status_of(applied: bool, is_store: bool) -> farside_status {
    match (applied, is_store) {
        (true, _) => FARSIDE_OK,
        (false, true) => FARSIDE_NOT_APPLIED,
        (false, false) => FARSIDE_ABSENT,
    }
}

/// An operation to be started.
#[derive(Clone, Copy)]
pub(crate) enum Start<'s> {
    Get,
    Store(&'s [u8], How<'s>),
    Delete,
    DeleteIfVersion(Version),
    Increment(i64),
    Touch(Duration),
}

impl Start<'_> {
    /// The operation with a value and an expected value that are kept elsewhere.
    pub(crate) fn with<'b>(self, value: &'b [u8], expected: &'b [u8]) -> Start<'b> {
        match self {
            Self::Get => Start::Get,
            Self::Store(_, how) => Start::Store(value, how.with(expected)),
            Self::Delete => Start::Delete,
            Self::DeleteIfVersion(version) => Start::DeleteIfVersion(version),
            Self::Increment(delta) => Start::Increment(delta),
            Self::Touch(ttl) => Start::Touch(ttl),
        }
    }
}

impl Lanes {
    /// Starts an operation. Returns its ticket.
    fn start(&mut self, key: &[u8], start: Start<'_>) -> Result<u64, PipelineFull> {
        let Some(pipeline) = &mut self.pipeline else { return Err(PipelineFull) };
        let mut started = Started::default();
        let ticket = match start {
            Start::Get => pipeline.get(key),
            Start::Store(value, how) => {
                started = Started { is_store: true, expected: how.expected.into() };
                let expected: *const [u8] = &*started.expected;
                // SAFETY: the box stays where it is until the lane's next operation starts. It is
                // dropped after the pipeline.
                pipeline.store(key, value, how.with(unsafe { &*expected }).store())
            }
            Start::Delete => pipeline.delete(key),
            Start::DeleteIfVersion(version) => pipeline.delete_if_version(key, version),
            Start::Increment(delta) => pipeline.increment(key, delta),
            Start::Touch(ttl) => pipeline.touch(key, ttl),
        }?;
        self.started[ticket.lane()] = started;
        Ok(ticket.number())
    }

    /// Takes a completed operation, and the text of its error.
    fn take(&mut self, waits: bool) -> Option<(farside_completed, Option<String>)> {
        let pipeline = self.pipeline.as_mut()?;
        let completed = if waits { pipeline.wait() } else { pipeline.poll() }?;
        let mut taken = farside_completed::new(completed.ticket.number(), FARSIDE_OK);
        let mut text = None;
        match completed.result {
            Ok(outcome) => {
                if let Some(value) = outcome.value {
                    (taken.value, taken.value_bytes) =
                        (value.data.as_ptr().cast(), value.data.len());
                    taken.version = value.version.to_u64();
                }
                taken.version = outcome.version.map_or(taken.version, Version::to_u64);
                taken.number = outcome.number;
                let is_store = self.started[completed.ticket.lane()].is_store;
                taken.status = status_of(outcome.applied, is_store) as i32;
            }
            Err(error) => {
                taken.status = farside_status::from(&error) as i32;
                text = Some(error.to_string());
            }
        }
        Some((taken, text))
    }
}

/// Stores a new pipeline.
///
/// # Safety
/// Unless NULL, `pipeline` leads to memory for it.
unsafe fn open(pipeline: *mut *mut farside_pipeline, driven: Driven) {
    let (error, health) = (CString::default(), Health::new());
    let opened = Box::into_raw(Box::new(farside_pipeline { driven, error, health }));
    // SAFETY: by the caller's promise.
    unsafe { store(pipeline, opened) };
}

/// Opens a pipeline that the caller drives: operations advance only in farside_pipeline_poll(),
/// farside_pipeline_wait() and farside_pipeline_close(). Until the pipeline is closed, operations
/// on the session fail. The text of an error of this function is farside_session_error().
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_pipeline_open(
    session: *mut farside_session,
    pipeline: *mut *mut farside_pipeline,
) -> farside_status {
    let call = |session: &mut farside_session| {
        // SAFETY: by the caller's promise.
        unsafe { set(pipeline, "pipeline", std::ptr::null_mut()) }?;
        let (lent, returned) = session.lend()?;
        let session = Box::into_raw(lent);
        let mut lanes = Lanes { pipeline: None, session, returned, started: Vec::new() };
        // SAFETY: the session does not move, and outlives the pipeline.
        let opened = unsafe { &mut *session }.pipeline()?;
        lanes.started.resize_with(opened.depth(), Started::default);
        lanes.pipeline = Some(opened);
        // SAFETY: likewise.
        unsafe { open(pipeline, Driven::ByCaller(Box::new(lanes))) };
        Ok(FARSIDE_OK)
    };
    // SAFETY: by the caller's promise.
    unsafe { with_session(session, call) }
}

/// Opens a pipeline that a thread of the library drives. Its farside_pipeline_event_fd() tells that
/// operations have completed, for poll(), epoll and event loops. Starting an operation copies key
/// and value to the heap. Close it with farside_pipeline_close(); its thread ends soon after. The
/// text of an error of this function is farside_error().
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_pipeline_open_threaded(
    client: *const farside_client,
    pipeline: *mut *mut farside_pipeline,
) -> farside_status {
    run_alone(|| {
        // SAFETY: by the caller's promise.
        unsafe { set(pipeline, "pipeline", std::ptr::null_mut()) }?;
        // SAFETY: likewise.
        let client = unsafe { shared(client, "client") }?;
        client.process.check()?;
        let queue = Queue::new(&client.client)?;
        // SAFETY: likewise.
        unsafe { open(pipeline, Driven::ByThread(queue)) };
        Ok(FARSIDE_OK)
    })
}

/// Completes the operations in flight, and closes the pipeline. May wait for the server. The
/// results are lost. Remove the descriptor from epoll before. NULL is allowed.
///
/// # Safety
/// `pipeline` is from a function that opens one, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_pipeline_close(pipeline: *mut farside_pipeline) {
    if pipeline.is_null() {
        return;
    }
    // SAFETY: by the caller's promise.
    let pipeline = unsafe { Box::from_raw(pipeline) };
    run_alone(|| {
        let process = pipeline.health.process;
        process.drop(*pipeline);
        Ok(FARSIDE_OK)
    });
}

/// Returns the descriptor of a pipeline that a thread drives; -1 for any other. It is readable
/// while there are completed operations, and may be readable without one: call
/// farside_pipeline_poll() until FARSIDE_NONE. Do not read or close the descriptor.
///
/// # Safety
/// `pipeline` is valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_pipeline_event_fd(pipeline: *const farside_pipeline) -> c_int {
    // SAFETY: by the caller's promise.
    match unsafe { pipeline.as_ref() } {
        Some(farside_pipeline { driven: Driven::ByThread(queue), .. }) => queue.descriptor(),
        _ => -1,
    }
}

/// Returns the text of the pipeline's last error, also of an operation. Valid until its next error;
/// empty if there was none.
///
/// # Safety
/// `pipeline` is valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_pipeline_error(
    pipeline: *const farside_pipeline,
) -> *const c_char {
    // SAFETY: by the caller's promise.
    unsafe { pipeline.as_ref() }
        .map_or(c"pipeline is NULL".as_ptr(), |pipeline| pipeline.error.as_ptr())
}

/// Calls a function with a pipeline, and keeps the text of its error there.
///
/// # Safety
/// `pipeline` is NULL or valid, and only this call uses it.
#[inline]
unsafe fn with_pipeline(
    pipeline: *mut farside_pipeline,
    call: impl FnOnce(&mut farside_pipeline) -> Result<farside_status, Failure>,
) -> farside_status {
    // SAFETY: by the caller's promise.
    let Some(pipeline) = (unsafe { pipeline.as_mut() }) else {
        return run_alone(|| Err(Failure::argument("pipeline is NULL")));
    };
    let ended = run(|| {
        pipeline.health.check()?;
        call(pipeline)
    });
    pipeline.health.note(&ended);
    if let Some(error) = ended.error {
        pipeline.error = error;
    }
    ended.status
}

/// Starts an operation, and stores its ticket.
///
/// # Safety
/// The arguments are valid.
unsafe fn start<'s>(
    pipeline: *mut farside_pipeline,
    (key, key_bytes): (*const c_void, usize),
    ticket: *mut u64,
    start: impl FnOnce() -> Result<Start<'s>, Failure>,
) -> farside_status {
    let call = |pipeline: &mut farside_pipeline| {
        // SAFETY: by the caller's promise.
        let key = unsafe { bytes(key, key_bytes) }?;
        let start = start()?;
        let number = match &mut pipeline.driven {
            Driven::ByThread(queue) => queue.start(key, start),
            Driven::ByCaller(lanes) => lanes.start(key, start),
        };
        let Ok(number) = number else { return Ok(FARSIDE_BUSY) };
        // SAFETY: likewise.
        unsafe { store(ticket, number) };
        Ok(FARSIDE_OK)
    };
    // SAFETY: by the caller's promise.
    unsafe { with_pipeline(pipeline, call) }
}

/// Starts a get, which copies the key, and stores its ticket, unless that is NULL. FARSIDE_BUSY if
/// no lane is free: then take a completed operation first. A pipeline that a thread drives has
/// 16384 lanes.
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_pipeline_get(
    pipeline: *mut farside_pipeline,
    key: *const c_void,
    key_bytes: usize,
    ticket: *mut u64,
) -> farside_status {
    let operation = Start::Get;
    // SAFETY: by the caller's promise.
    unsafe { start(pipeline, (key, key_bytes), ticket, || Ok(operation)) }
}

/// Starts a delete. Otherwise as farside_pipeline_get().
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_pipeline_delete(
    pipeline: *mut farside_pipeline,
    key: *const c_void,
    key_bytes: usize,
    ticket: *mut u64,
) -> farside_status {
    let operation = Start::Delete;
    // SAFETY: by the caller's promise.
    unsafe { start(pipeline, (key, key_bytes), ticket, || Ok(operation)) }
}

/// Starts a delete of a key with this version. Otherwise as farside_pipeline_get().
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_pipeline_delete_if_version(
    pipeline: *mut farside_pipeline,
    key: *const c_void,
    key_bytes: usize,
    version: u64,
    ticket: *mut u64,
) -> farside_status {
    let operation = Start::DeleteIfVersion(Version::from_u64(version));
    // SAFETY: by the caller's promise.
    unsafe { start(pipeline, (key, key_bytes), ticket, || Ok(operation)) }
}

/// Starts an increment. Otherwise as farside_pipeline_get().
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_pipeline_increment(
    pipeline: *mut farside_pipeline,
    key: *const c_void,
    key_bytes: usize,
    delta: i64,
    ticket: *mut u64,
) -> farside_status {
    let operation = Start::Increment(delta);
    // SAFETY: by the caller's promise.
    unsafe { start(pipeline, (key, key_bytes), ticket, || Ok(operation)) }
}

/// Starts a touch. Otherwise as farside_pipeline_get().
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_pipeline_touch(
    pipeline: *mut farside_pipeline,
    key: *const c_void,
    key_bytes: usize,
    ttl_ms: u64,
    ticket: *mut u64,
) -> farside_status {
    let operation = || Ok(Start::Touch(ttl_of(ttl_ms)?));
    // SAFETY: by the caller's promise.
    unsafe { start(pipeline, (key, key_bytes), ticket, operation) }
}

/// Starts a store, as farside_store(). Otherwise as farside_pipeline_get().
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_pipeline_store(
    pipeline: *mut farside_pipeline,
    key: *const c_void,
    key_bytes: usize,
    value: *const c_void,
    value_bytes: usize,
    options: *const farside_store_options,
    ticket: *mut u64,
) -> farside_status {
    let operation = || {
        // SAFETY: by the caller's promise.
        let value = unsafe { bytes(value, value_bytes) }?;
        // SAFETY: likewise.
        Ok(Start::Store(value, unsafe { How::read(options) }?))
    };
    // SAFETY: likewise.
    unsafe { start(pipeline, (key, key_bytes), ticket, operation) }
}

/// Stores a completed operation.
///
/// # Safety
/// The arguments are valid.
unsafe fn take(
    pipeline: *mut farside_pipeline,
    completed: *mut farside_completed,
    waits: bool,
) -> farside_status {
    let call = |pipeline: &mut farside_pipeline| {
        if completed.is_null() {
            return Err(Failure::argument("completed is NULL"));
        }
        let taken = match &mut pipeline.driven {
            Driven::ByCaller(lanes) => lanes.take(waits),
            Driven::ByThread(queue) => queue.take(waits),
        };
        let Some((taken, text)) = taken else { return Ok(FARSIDE_NONE) };
        // SAFETY: by the caller's promise.
        unsafe { store(completed, taken) };
        if let Some(text) = text {
            pipeline.error = c_text(text);
        }
        Ok(FARSIDE_OK)
    };
    // SAFETY: by the caller's promise.
    unsafe { with_pipeline(pipeline, call) }
}

/// Takes a completed operation, and copies it to `completed`. Does not wait: FARSIDE_NONE if there
/// is none.
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_pipeline_poll(
    pipeline: *mut farside_pipeline,
    completed: *mut farside_completed,
) -> farside_status {
    // SAFETY: by the caller's promise.
    unsafe { take(pipeline, completed, false) }
}

/// Waits for a completed operation, and copies it to `completed`. FARSIDE_NONE if none is in
/// flight.
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_pipeline_wait(
    pipeline: *mut farside_pipeline,
    completed: *mut farside_completed,
) -> farside_status {
    // SAFETY: by the caller's promise.
    unsafe { take(pipeline, completed, true) }
}
