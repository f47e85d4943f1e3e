//! What ends a command early: a signal, or a failure of another of its threads. Code that writes a
//! file checks for both, so that it leaves no half-written file.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use farside_config::command_line::exit_code;
use farside_config::signals::is_ignored;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::low_level::signal_name;

/// What [`StopSignal`] has after [`StopSignal::cancel`]: no number of a signal.
const CANCELLED: usize = usize::MAX;

/// The signal that asked this process to end, if one came.
#[derive(Debug, Default)]
pub(crate) struct StopSignal(Arc<AtomicUsize>);

impl StopSignal {
    /// Starts to record signals. A second signal kills the process at once.
    pub(crate) fn listen() -> anyhow::Result<Self> {
        let (stop, is_second) = (Self::default(), Arc::new(AtomicBool::new(false)));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            if !is_ignored(signal) {
                // In this order, so that on the first signal the conditional handler finds the flag
                // unset.
                flag::register_conditional_default(signal, Arc::clone(&is_second))?;
                flag::register(signal, Arc::clone(&is_second))?;
                flag::register_usize(signal, Arc::clone(&stop.0), signal as usize)?;
            }
        }
        Ok(stop)
    }

    /// Fails if a signal has come, or the command was cancelled.
    pub(crate) fn check(&self) -> Result<(), Stopped> {
        match self.0.load(Ordering::Relaxed) {
            0 => Ok(()),
            CANCELLED => Err(Stopped::Cancelled),
            signal => Err(Stopped::Signal(signal as u8)),
        }
    }

    /// Makes the other threads of the command end: one has failed. Its error is the command's.
    pub(crate) fn cancel(&self) {
        // A signal that came before stays.
        let _ = self.0.compare_exchange(0, CANCELLED, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Why a command has to end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Stopped {
    /// A signal came.
    #[error("stopped by {}", signal_name((*.0).into()).unwrap_or("a signal"))]
    Signal(u8),
    /// Another thread of the command has failed.
    #[error("another part of the command has failed")]
    Cancelled,
}

impl Stopped {
    /// Returns the exit code by which shells report a process that a signal ended.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Signal(signal) => 128 + signal,
            Self::Cancelled => exit_code::FAILED,
        }
    }
}

/// Limit on the threads of a command. Each may have a session of its own at every server.
const THREADS_MAX: usize = 8;

/// Locks, and ignores poisoning: a command whose thread panics panics, too.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does the work for all items, up to [`THREADS_MAX`] at a time. Returns the results in the order
/// of the items.
///
/// # Errors
/// The first failure. From then on no other item is begun, and `stop` is cancelled, which the work
/// under way has to check.
pub(crate) fn for_all<I: Send, T: Send>(
    items: Vec<I>,
    stop: &StopSignal,
    work: impl Fn(I) -> anyhow::Result<T> + Sync,
) -> anyhow::Result<Vec<T>> {
    let threads = items.len().min(THREADS_MAX);
    let queue = Mutex::new(items.into_iter().enumerate());
    let outcome = Mutex::new(Ok(Vec::new()));
    let next = || lock(&queue).next();
    let worker = || {
        while let Some((number, item)) = next() {
            let result = stop.check().map_err(Into::into).and_then(|()| work(item));
            let outcome = &mut *lock(&outcome);
            match (result, outcome) {
                (Ok(result), Ok(results)) => results.push((number, result)),
                (Err(error), outcome @ Ok(_)) => {
                    *outcome = Err(error);
                    stop.cancel();
                }
                (_, Err(_)) => {}
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            // If the system refuses a thread, there are fewer.
            let _ = thread::Builder::new().spawn_scoped(scope, worker);
        }
        worker();
    });
    let outcome: anyhow::Result<Vec<_>> =
        outcome.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut results = outcome?;
    results.sort_by_key(|(number, _)| *number);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn results_have_the_order_of_the_items_and_a_failure_ends_the_work() {
        let stop = StopSignal::default();
        let squares = for_all((0..100).collect(), &stop, |number: u64| Ok(number * number));
        assert_eq!(squares.unwrap(), (0..100).map(|number| number * number).collect::<Vec<_>>());
        let begun = AtomicUsize::new(0);
        let failed = for_all((0..1000).collect(), &stop, |number: u64| {
            begun.fetch_add(1, Ordering::Relaxed);
            if number == 3 {
                anyhow::bail!("item {number} failed");
            }
            let is_stopped = || number < 3 || stop.check().is_err();
            while !is_stopped() {
                std::thread::yield_now();
            }
            Ok(())
        });
        assert_eq!(failed.unwrap_err().to_string(), "item 3 failed");
        assert!(begun.into_inner() <= 4 + THREADS_MAX);
    }
}
