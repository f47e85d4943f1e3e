//! Long values of several keys: each goes between its region and the caller's memory, and their
//! chains share doorbells.

use farside_fabric::{AnyFabric, LaneId, Loan};
use farside_layout::hash::KeyHash;
use farside_protocol::{Failure, LONG_VALUE_BYTES, Lifetime, OperationKind, PostedGet, PostedPut};

use crate::connection::SessionRegion;
use crate::session_regions::OpenShard;
use crate::{ReadValue, Result, Session};

/// Limit on the chains that share a doorbell.
const CHAINS_MAX: usize = 32;

/// One of several GETs.
pub(crate) struct ManyGet<'t> {
    pub(crate) key: &'t [u8],
    pub(crate) target: &'t mut [u8],
    /// The result, once there is one; `Some(None)` if the key is absent.
    pub(crate) read: Option<Option<ReadValue>>,
}

/// One of several PUTs.
#[derive(Clone, Copy)]
pub(crate) struct ManyPut<'v> {
    pub(crate) key: &'v [u8],
    pub(crate) value: &'v [u8],
    pub(crate) is_done: bool,
}

impl Session {
    /// Gets long values at cached locations. Other GETs have no result afterwards.
    pub(crate) fn get_long(&mut self, gets: &mut [ManyGet<'_>]) -> Result<()> {
        if self.regions.engine.pipelined.get() {
            return Ok(());
        }
        let (at_once, mut share_doorbells) = (self.executes_at_once(), false);
        let mut result = Ok(());
        // A long value does not fit into a short target.
        for ManyGet { key, target, read } in
            gets.iter_mut().filter(|get| get.target.len() >= LONG_VALUE_BYTES)
        {
            let (hash, shard) = self.regions.route(key);
            let open = self.regions.live(shard);
            let class = open.and_then(|open| self.regions.at(open).cached_class(hash));
            let Some(class) = class else { continue };
            let is_long = class.block_bytes() >= LONG_VALUE_BYTES as u64;
            // The extents of a value share doorbells.
            if class.is_head() || at_once && is_long {
                match self.get_into(*key, &mut **target) {
                    Ok(found) => *read = Some(found),
                    Err(error) => result = result.and(Err(error)),
                }
            } else {
                share_doorbells |= is_long;
            }
        }
        if share_doorbells {
            result = result.and(run_together(self, gets));
        }
        result
    }

    /// Stores long values: those with extents, and those whose locations are cached. Other PUTs are
    /// not done afterwards. Nor are those of shards that are not connected.
    pub(crate) fn put_long(&mut self, puts: &mut [ManyPut<'_>]) -> Result<()> {
        let is_long = |put: &ManyPut<'_>| put.value.len() >= LONG_VALUE_BYTES;
        if self.regions.engine.pipelined.get() || !puts.iter().any(is_long) {
            return Ok(());
        }
        self.check_role(OperationKind::Put)?;
        let (at_once, mut share_doorbells) = (self.executes_at_once(), false);
        let mut result = Ok(());
        for put in puts.iter_mut().filter(|put| is_long(put)) {
            let ManyPut { key, value, .. } = *put;
            let Some(open) = self.regions.live(self.regions.route(key).1) else { continue };
            if at_once || !self.regions.at(open).is_short(key, value.len()) {
                let stored = self.put(key, value);
                put.is_done = stored.is_ok();
                result = result.and(stored);
            } else {
                share_doorbells = true;
            }
        }
        if share_doorbells {
            result = result.and(run_together(self, puts));
        }
        result
    }
}

/// An operation on a long value.
trait Transfer<'s, 'm> {
    /// The operation while its chain is in flight.
    type Posted;

    const KIND: OperationKind;

    fn key(&self) -> &[u8];

    fn is_done(&self) -> bool;

    /// Posts the chain, if it needs no more than one.
    fn post(
        &'m mut self,
        handle: SessionRegion<'s>,
        hash: KeyHash,
        loan: &Loan<'_, 'm, AnyFabric>,
        lane: LaneId,
    ) -> std::result::Result<Option<Self::Posted>, Failure>;

    /// Evaluates the chain's result. No other chain is in flight.
    fn complete(
        posted: Self::Posted,
        loan: &Loan<'_, 'm, AnyFabric>,
    ) -> std::result::Result<(), Failure>;
}

impl<'s, 'm, 't: 'm> Transfer<'s, 'm> for ManyGet<'t> {
    const KIND: OperationKind = OperationKind::Get;
    type Posted = (PostedGet<'s, 'm, AnyFabric>, &'m mut Option<Option<ReadValue>>);

    fn key(&self) -> &[u8] {
        self.key
    }

    fn is_done(&self) -> bool {
        self.read.is_some()
    }

    fn post(
        &'m mut self,
        handle: SessionRegion<'s>,
        hash: KeyHash,
        loan: &Loan<'_, 'm, AnyFabric>,
        lane: LaneId,
    ) -> std::result::Result<Option<Self::Posted>, Failure> {
        let Self { key, target, read } = self;
        let posted = handle.post_get(loan, lane, (hash, key), target);
        Ok(posted.map(|posted| (posted, read)))
    }

    fn complete(
        (posted, read): Self::Posted,
        loan: &Loan<'_, 'm, AnyFabric>,
    ) -> std::result::Result<(), Failure> {
        *read = posted.complete(loan)?;
        Ok(())
    }
}

impl<'s, 'm, 'v: 'm> Transfer<'s, 'm> for ManyPut<'v> {
    const KIND: OperationKind = OperationKind::Put;
    type Posted = (PostedPut<'s, 'm, AnyFabric>, &'m mut bool);

    fn key(&self) -> &[u8] {
        self.key
    }

    fn is_done(&self) -> bool {
        self.is_done
    }

    fn post(
        &'m mut self,
        handle: SessionRegion<'s>,
        hash: KeyHash,
        loan: &Loan<'_, 'm, AnyFabric>,
        lane: LaneId,
    ) -> std::result::Result<Option<Self::Posted>, Failure> {
        let Self { key, value, is_done } = self;
        let posted = handle.post_put(loan, lane, Lifetime::FOREVER, (hash, key), value)?;
        Ok(posted.map(|posted| (posted, is_done)))
    }

    fn complete(
        (posted, is_done): Self::Posted,
        _: &Loan<'_, 'm, AnyFabric>,
    ) -> std::result::Result<(), Failure> {
        posted.complete()?;
        *is_done = true;
        Ok(())
    }
}

/// Runs the operations that need no more than one chain, with one doorbell for each server and up
/// to [`CHAINS_MAX`] chains. Returns the first error. An operation that a lost connection has kept
/// from taking effect is not done afterwards.
fn run_together<'s, 'm, T: Transfer<'s, 'm>>(
    session: &'s Session,
    operations: &'m mut [T],
) -> Result<()> {
    let Session { regions, shared, .. } = session;
    let endpoint = &regions.engine.endpoint;
    let lanes = CHAINS_MAX.min(shared.options.lanes.into());
    let fail = |open: &OpenShard, failure: Failure| match shared.handle_failure(
        open.number,
        &open.connection,
        failure,
    ) {
        None => Ok(()),
        Some(error) => {
            session.count_error(T::KIND, &error);
            Err(error)
        }
    };
    let mut left = operations.iter_mut().filter(|operation| !operation.is_done()).peekable();
    while left.peek().is_some() {
        endpoint.lending(|loan| {
            let mut result = Ok(());
            let mut posted = [const { None }; CHAINS_MAX];
            let mut used = 0;
            while used < lanes
                && let Some(next) = left.peek()
            {
                let (hash, shard) = regions.route(next.key());
                let open = regions.live(shard);
                let has_room = |open: &OpenShard| endpoint.has_room(open.region.index, 0);
                if used > 0 && !open.is_none_or(has_room) {
                    break;
                }
                let (Some(next), Some(open)) = (left.next(), open) else { continue };
                endpoint.tick();
                let (handle, lane) = (regions.at(open), LaneId(used as u16));
                match next.post(handle, hash, loan, lane) {
                    Ok(None) => {}
                    Ok(Some(operation)) => {
                        posted[used] = Some((open, operation));
                        used += 1;
                    }
                    Err(failure) => result = result.and(fail(open, failure)),
                }
            }
            let mut in_flight = used;
            while in_flight > 0 {
                endpoint.step(|lane| in_flight -= usize::from(usize::from(lane.0) < used));
            }
            endpoint.tick();
            for (open, operation) in posted.into_iter().flatten() {
                if let Err(failure) = T::complete(operation, loan) {
                    result = result.and(fail(open, failure));
                }
            }
            result
        })?;
    }
    regions.count_traffic();
    Ok(())
}
