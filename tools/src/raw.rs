//! The region itself, read-only, for the checker.

use std::time::Duration;

use farside_common::attach::{AnyFabric, Attached, Target};
use farside_common::check::{self, Observer, Report, Scope};
use farside_common::config::ClientConfig;
use farside_common::control::Role;
use farside_common::fabric::{Endpoint, LaneId};
use indicatif::ProgressBar;

use crate::output;

/// The only lane of the checker's endpoint.
const LANE: LaneId = LaneId(0);
/// How long the server may take to take the goodbye.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// A region that cannot be changed from here: the memory, or the device, refuses it.
pub(crate) struct RawRegion(Attached);

impl RawRegion {
    /// Connects as a reader of its own.
    pub(crate) fn open(config: &ClientConfig) -> anyhow::Result<Self> {
        let target = Target::of(config, Role::Reader)?;
        Ok(Self(target.attach(target.timeout)?))
    }

    /// Checks the region while clients go on.
    pub(crate) fn check(&self, scope: Scope, bar: &ProgressBar) -> anyhow::Result<Report> {
        let (bytes, mut observer) = (self.0.welcome.region_bytes, OnBar(bar));
        Ok(match self.0.route.fabric(1)? {
            AnyFabric::Shm(fabric) => {
                check::check(&Endpoint::new(fabric, 1), LANE, bytes, scope, &mut observer)?
            }
            AnyFabric::Verbs(fabric) => {
                check::check(&Endpoint::new(fabric, 1), LANE, bytes, scope, &mut observer)?
            }
        })
    }
}

impl Drop for RawRegion {
    fn drop(&mut self) {
        self.0.channel.say_goodbye(FLUSH_TIMEOUT);
    }
}

pub(crate) struct OnBar<'a>(pub(crate) &'a ProgressBar);

impl Observer for OnBar<'_> {
    fn progress(&mut self, done: u64, total: u64) {
        if self.0.length() != Some(total) {
            output::set_total(self.0, total);
        }
        self.0.set_position(done);
    }
}
