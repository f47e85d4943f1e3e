//! Threads that the system may refuse.

use std::thread::{Builder, Scope, ScopedJoinHandle};

use crate::{Error, Result};

/// As [`Scope::spawn`], which panics then.
///
/// # Errors
/// [`Error::System`].
pub fn start<'s, T: Send + 's>(
    scope: &'s Scope<'s, '_>,
    work: impl FnOnce() -> T + Send + 's,
) -> Result<ScopedJoinHandle<'s, T>> {
    Builder::new().spawn_scoped(scope, work).map_err(Error::system("starting a thread"))
}
