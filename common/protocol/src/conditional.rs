//! Compare-and-exchange of values and versions.

use farside_fabric::{Buffer, Fabric};

use super::swing::{BlockFate, NewBlock, SwingResult};
use super::{Found, Operation, ProtocolResult, RetryState, is_moving};
use crate::Lifetime;
use crate::Version;

/// The condition of an exchange.
#[derive(Clone, Copy, Debug)]
pub enum Expected<'v> {
    /// The key has this value.
    Value(&'v [u8]),
    /// The key has the value that this write stored.
    Version(Version),
}

impl<F: Fabric> Operation<'_, F> {
    /// Stores the value if the key's present value is as expected. Returns whether it was; if not,
    /// also the present value, whose bytes are in [`Buffer::ReadBlock`]. One round trip more than a
    /// GET.
    pub async fn compare_exchange(
        &self,
        expected: Expected<'_>,
        lifetime: Lifetime,
    ) -> ProtocolResult<(bool, Option<Found>)> {
        let new = self.seal_block(self.take_block().await?, lifetime)?;
        let mut mismatch = None;
        let outcome = self.exchange_block(&new, expected, &mut mismatch).await;
        let linked = self.release_new_block(&new, outcome)?;
        Ok((linked == BlockFate::Linked, mismatch))
    }

    async fn exchange_block(
        &self,
        new: &NewBlock,
        expected: Expected<'_>,
        mismatch: &mut Option<Found>,
    ) -> ProtocolResult<BlockFate> {
        let mut tries = RetryState::default();
        let mut found = self.get().await?;
        loop {
            let is_expected = found.is_some_and(|found| self.is_expected(&found, expected));
            let Some(target) = self.located_target().filter(|_| is_expected) else {
                *mismatch = found;
                return Ok(BlockFate::Unused);
            };
            if is_moving(target.word) {
                self.wait_for_split(&mut tries).await?;
            } else {
                // The new word is conditional, so that no PUT counts as overwritten by it.
                let desired = target.word.live(new.block, true);
                if let SwingResult::Done =
                    self.swing(&target, Some(new), desired, self.now()).await?
                {
                    return Ok(BlockFate::Linked);
                }
                self.try_again(&mut tries).await?;
            }
            // This GET goes by the window, because another session may have cached the location by
            // an older directory.
            found = self.get_uncached().await?;
        }
    }

    fn is_expected(&self, found: &Found, expected: Expected<'_>) -> bool {
        match expected {
            Expected::Version(version) => found.version == version,
            Expected::Value(value) => {
                let block = self.engine.endpoint.buffer(self.lane, Buffer::ReadBlock);
                found.value_in(&block) == value
            }
        }
    }
}
