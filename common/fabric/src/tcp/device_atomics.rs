//! Chains on a region that an RDMA device serves, too.
//!
//! A device's atomic verbs and a processor's do not exclude each other. So all atomic verbs on such
//! a region go through the device (invariant I11): an executor hands them to a queue pair of the
//! server to itself. It executes all other verbs itself, because a WRITE is atomic with no other
//! verb on any fabric. `docs/decisions/0020-rdma-and-tcp.md` has the argument, for the times, too.

use std::sync::atomic::{Ordering, fence};

use crate::memory::{ChainMemory, Executor};
use crate::{ChainError, Nanos, Verb};

/// Executes atomic verbs through an RDMA device, for one thread.
pub trait DeviceAtomics: Send {
    /// Connects to the device, if the last connection broke. This may take long, so the executor
    /// checks the lease after it.
    ///
    /// # Errors
    /// [`ChainError::Fenced`]: the device cannot be used at present.
    fn prepare(&mut self) -> Result<(), ChainError>;

    /// Executes atomic verbs in order, and returns the word that the last one found. Verbs that do
    /// not complete are stopped before the deadline: they have taken effect by then, or never will.
    ///
    /// # Errors
    /// [`ChainError::Late`] if too little time is left for the device, [`ChainError::Fenced`] and
    /// [`ChainError::Unknown`] if the connection broke, [`ChainError::Outside`]. None was executed,
    /// except perhaps after `Unknown`.
    fn run(&mut self, verbs: &[Verb], deadline: Nanos) -> Result<u64, ChainError>;
}

/// Executes a chain as [`Executor::execute`] does, with the atomic verbs through the device.
pub(super) fn execute(
    device: &mut dyn DeviceAtomics,
    executor: &Executor,
    memory: &mut impl ChainMemory,
    chain: &[Verb],
    deadline: Nanos,
) -> Result<u64, ChainError> {
    let mut found = None;
    for part in chain.chunk_by(|verb, next| verb.is_atomic() == next.is_atomic()) {
        if part.iter().any(|verb| verb.is_atomic()) {
            // The device takes all chains of this server's own queue pair for a writer's.
            if !executor.region.is_writable() {
                return Err(ChainError::Denied);
            }
            device.prepare()?;
            executor.check_lease()?;
            // The WRITEs before are visible when the device gets the verbs (I2).
            fence(Ordering::SeqCst);
            found = Some(device.run(part, deadline)?);
            // The READs behind return no word from before the swap (I8).
            fence(Ordering::SeqCst);
        } else if found.is_none() {
            executor.execute(memory, part, deadline)?;
        } else {
            read_after_swap(executor, memory, part, deadline)?;
        }
    }
    Ok(found.unwrap_or(0))
}

/// Executes the verbs behind a swap. A READ does not check the lease: a chain whose swap took
/// effect must not end as one that was fenced.
fn read_after_swap(
    executor: &Executor,
    memory: &mut impl ChainMemory,
    verbs: &[Verb],
    deadline: Nanos,
) -> Result<(), ChainError> {
    for verb in verbs {
        match *verb {
            Verb::Read { remote, into, bytes } => {
                executor.region.read(remote, memory.target(into, bytes))?;
            }
            // No chain of the protocol has a WRITE here.
            _ => executor.execute(memory, &[*verb], deadline).map(drop)?,
        }
    }
    Ok(())
}
