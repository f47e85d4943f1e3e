//! An operation on one key, and the steps that several kinds of operations share.

use std::cell::Cell;

use farside_fabric::wait_timer::WaitTimer;
use farside_fabric::{Buffer, ChainError, Fabric, InFlight, LaneId, Nanos, Verb};
use farside_layout::hash::KeyHash;
use farside_layout::{
    BLOCK_HEADER_BYTES, Block, BlockAddress, BlockRef, HeaderWord, LayoutError, SizeClass,
    SlotState, SlotWord,
};

use crate::engine::{Engine, LANE, has_expired};
use crate::failure::Failure;
use crate::location_cache::{FoundEntry, Location, Successor};
use crate::new_block::{BlockFate, NewBlock};
use crate::open_region::OpenRegion;
use crate::operation_metrics::{OperationKind, RetryReason};
use crate::region_handle::RegionHandle;
use crate::retry_state::RetryState;
use crate::waiting::has_timed_out;
use crate::{Action, Change, Lifetime, Modification, OperationError, ProtocolResult, Version};

/// A value of so many bytes, or more, is long. The two calls of a long transfer are worth it from
/// about this length on.
pub const LONG_VALUE_BYTES: usize = 4096;
/// Limit on the attempts of an operation that other clients keep disturbing.
pub(crate) const ATTEMPTS_MAX: u32 = 128;
/// The longest pause between two READs of a word that a split is moving.
const MOVING_PAUSE_NS_MAX: Nanos = 60_000;
/// Limit on the doublings of a pause between attempts.
const BACKOFF_DOUBLINGS_MAX: u32 = 10;
/// The shortest pause between two READs of a word that a split is moving.
const MOVING_PAUSE_NS_MIN: Nanos = 250;

/// The result of an operation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Answer {
    /// Whether the condition held, and so the change was made.
    pub applied: bool,
    /// The version of the value that the operation stored or left in place. `None` if there is
    /// none, if it was overwritten at once, or if the operation did not need to READ it.
    pub version: Option<Version>,
    /// The number that an increment stored; 0 for other operations.
    pub number: i64,
    /// The value that a GET found, or the one before a modification.
    pub found: Option<Found>,
}

impl Answer {
    /// The answer of a GET.
    #[inline]
    pub fn found(found: Option<Found>) -> Self {
        let version = found.map(|found| found.version);
        Self { applied: found.is_some(), version, number: 0, found }
    }

    /// The answer of a PUT whose value has this version.
    #[inline]
    pub fn stored(version: Option<Version>) -> Self {
        Self { applied: true, version, number: 0, found: None }
    }

    /// The answer of a store, by whether its block is linked.
    pub(crate) fn of_store(fate: BlockFate, new: &NewBlock, applied: bool) -> Self {
        match fate {
            BlockFate::Linked => Self::stored(Some(new.version())),
            BlockFate::Unused => Self { applied, ..Self::default() },
        }
    }
}

/// One operation on one key, on one lane. The key is in the lane's [`Buffer::NewBlock`], at its
/// offset in the block that a PUT writes.
pub struct Operation<'e, F> {
    pub(crate) engine: &'e Engine<F>,
    pub(crate) region: &'e OpenRegion,
    pub(crate) lane: LaneId,
    pub(crate) hash: KeyHash,
    pub(crate) key_bytes: usize,
    pub(crate) value_bytes: usize,
    /// The likely new block of the key, if the caller has already READ the cached location in vain.
    pub(crate) successor: Option<Successor>,
    /// The location at which this operation's last GET found the key, and the byte offset of its
    /// window; `None` for the window to which the directory leads.
    pub(crate) located: Cell<Option<(Location, Option<u64>)>>,
}

/// A value that a GET found. Its bytes are in the lane's [`Buffer::ReadBlock`].
#[derive(Clone, Copy, Debug)]
pub struct Found {
    /// The write that stored the value.
    pub version: Version,
    pub(crate) expires_at_ms: u64,
    pub(crate) value_start: u32,
    /// The value's length, in bytes.
    pub value_bytes: u32,
}

impl Found {
    /// The value of this block, which was READ from the start of its buffer.
    #[inline]
    pub(crate) fn new(address: BlockAddress, block: &Block<'_>) -> Self {
        Self {
            version: Version::of(address, block.header_word().generation),
            expires_at_ms: block.expires_at_ms(),
            value_start: (BLOCK_HEADER_BYTES as usize + block.key().len()) as u32,
            value_bytes: block.value().len() as u32,
        }
    }

    /// The value's bytes in the content of the buffer.
    #[inline]
    pub fn value_in<'b>(&self, block: &'b [u8]) -> &'b [u8] {
        &block[self.value_start as usize..][..self.value_bytes as usize]
    }

    /// When the value expires, in milliseconds since 1970; 0 for never.
    pub fn expires_at_ms(&self) -> u64 {
        self.expires_at_ms
    }

    /// The padding units at the end of its block, which has this class.
    pub(crate) fn padding(&self, class: SizeClass) -> u8 {
        class.padding((self.value_start + self.value_bytes).into())
    }
}

/// A slot that has the key, as seen during this operation or proved before it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProvenSlot {
    pub(crate) slot: u64,
    pub(crate) word: SlotWord,
    /// The full generation of its block, if known.
    pub(crate) generation: Option<u32>,
    /// When its value expires, in milliseconds since 1970; 0 for never. `None` if not known.
    pub(crate) expires_at_ms: Option<u64>,
    /// When the latest READ or compare-and-swap that proved it was posted.
    pub(crate) proved_at: Nanos,
}

impl ProvenSlot {
    /// A slot whose block was not READ. A word that is not conditional leads to no value that
    /// expires (invariant I19).
    pub(crate) fn unread(slot: u64, word: SlotWord, proved_at: Nanos) -> Self {
        let expires_at_ms = (!word.is_conditional()).then_some(0);
        Self { slot, word, generation: None, expires_at_ms, proved_at }
    }

    /// The slot of a location that is cached or that a GET found. `window` is the window's byte
    /// offset.
    #[inline]
    pub(crate) fn located(location: Location, window: u64) -> Self {
        let Location { word, generation, expires, proved_at, .. } = location;
        let (generation, expires_at_ms) = (Some(generation), (!expires).then_some(0));
        let slot = window + u64::from(location.in_window);
        Self { slot, word, generation, expires_at_ms, proved_at }
    }

    /// This slot, whose block was READ.
    pub(crate) fn read(self, found: &Found, header: HeaderWord) -> Self {
        let (generation, expires_at_ms) = (Some(header.generation), Some(found.expires_at_ms));
        Self { generation, expires_at_ms, ..self }
    }
}

/// The result of the checks of a block that was READ.
pub(crate) enum ExaminedBlock {
    /// The block of this key.
    Ours(Found, HeaderWord),
    /// The block of another key.
    Other,
    Damaged(LayoutError),
}

impl<F: Fabric> RegionHandle<'_, F> {
    /// Runs an operation on a key with this hash to its end. No other operation may be in flight.
    #[inline]
    pub fn perform(
        self,
        action: Action<'_>,
        (hash, key): (KeyHash, &[u8]),
        value: &[u8],
    ) -> ProtocolResult<Answer> {
        if let Action::Put(lifetime) = action {
            return Ok(Answer::stored(self.put(lifetime, (hash, key), value)?));
        }
        self.region.check_key(key)?;
        self.region.check_value(value)?;
        self.engine.check_expiry(action)?;
        let operation = Operation::stage(self, LANE, (hash, key), value);
        self.measure(
            OperationKind::of(action),
            None,
            |answer: &Answer| answer.applied,
            || self.engine.endpoint.drive(operation.perform(action)),
        )
    }

    /// Runs a PUT to its end. No other operation may be in flight. Returns the version of the
    /// value; `None` if another PUT has already overwritten it.
    #[inline]
    pub fn put(
        self,
        lifetime: Lifetime,
        (hash, key): (KeyHash, &[u8]),
        value: &[u8],
    ) -> ProtocolResult<Option<Version>> {
        self.region.check_key(key)?;
        self.region.check_value(value)?;
        self.engine.check_expiry(Action::Put(lifetime))?;
        if value.len() >= LONG_VALUE_BYTES {
            return self.put_long(lifetime, (hash, key), value);
        }
        Operation::stage(self, LANE, (hash, key), value).put_alone(lifetime)
    }
}

impl<'e, F: Fabric> Operation<'e, F> {
    /// Prepares an operation on a key with this hash: copies key and value into the lane's buffer.
    /// Both must be within the region's limits.
    #[inline]
    pub fn stage(
        handle: RegionHandle<'e, F>,
        lane: LaneId,
        (hash, key): (KeyHash, &[u8]),
        value: &[u8],
    ) -> Self {
        Self::fill(handle.engine, lane, key, value);
        Self::staged(handle, lane, hash, (key.len(), value.len()), None)
    }

    /// Copies key and value into the lane's [`Buffer::NewBlock`]. They stay there as they are until
    /// the lane's next operation (invariant I28).
    #[inline(always)]
    pub fn fill(engine: &Engine<F>, lane: LaneId, key: &[u8], value: &[u8]) {
        let start = BLOCK_HEADER_BYTES as usize;
        let end = start + key.len() + value.len();
        let mut fabric = engine.endpoint.fabric_mut();
        fabric.reserve(lane, Buffer::NewBlock, end);
        let image = &mut fabric.buffer_mut(lane, Buffer::NewBlock)[start..end];
        let (key_image, value_image) = image.split_at_mut(key.len());
        key_image.copy_from_slice(key);
        if !value.is_empty() {
            value_image.copy_from_slice(value);
        }
    }

    /// An operation whose key, with this hash, and value are in the lane's buffer already. Its GET
    /// continues with [`RegionHandle::successor_by_mark`], if there is one.
    #[inline]
    pub fn staged(
        handle: RegionHandle<'e, F>,
        lane: LaneId,
        hash: KeyHash,
        (key_bytes, value_bytes): (usize, usize),
        successor: Option<Successor>,
    ) -> Self {
        let (RegionHandle { engine, region }, located) = (handle, Cell::new(None));
        Self { engine, region, lane, hash, key_bytes, value_bytes, successor, located }
    }

    /// Performs the action.
    pub async fn perform(&self, action: Action<'_>) -> ProtocolResult<Answer> {
        match action {
            Action::Get => Ok(Answer::found(self.get().await?)),
            Action::Version => {
                let version = self.version().await?;
                Ok(Answer { applied: version.is_some(), version, ..Answer::default() })
            }
            Action::Put(lifetime) => self.put(lifetime).await,
            Action::Insert(lifetime) => self.insert(lifetime).await,
            Action::Update(lifetime) => self.update(lifetime).await,
            Action::Delete => Ok(Answer { applied: self.delete().await?, ..Answer::default() }),
            Action::Exchange(expected, lifetime) => {
                let change = Change::Store(Some(expected));
                let modification = Modification { change, creates: false, lifetime, returns: true };
                let answer = self.modify(modification).await?;
                // Only the value that was not expected is of interest.
                Ok(Answer { found: answer.found.filter(|_| !answer.applied), ..answer })
            }
            Action::Modify(modification) => self.modify(modification).await,
        }
    }

    #[inline]
    pub(crate) fn handle(&self) -> RegionHandle<'e, F> {
        self.engine.at(self.region)
    }

    /// Converts the error of this operation's chain.
    pub(crate) fn failed(&self, error: ChainError) -> Failure {
        self.handle().failed(error)
    }

    #[inline]
    pub(crate) fn now(&self) -> Nanos {
        self.engine.endpoint.now()
    }

    #[inline]
    pub(crate) fn is_fresh(&self, posted: Nanos) -> bool {
        self.handle().is_fresh(posted)
    }

    /// As [`has_expired`].
    #[inline]
    pub(crate) fn has_expired(&self, expires_at_ms: u64, posted: Nanos) -> bool {
        has_expired(&*self.engine.endpoint.fabric(), expires_at_ms, posted)
    }

    /// Posts a chain: one round trip. A change takes effect before the deadline or never.
    #[inline]
    pub(crate) fn chain(&self, verbs: &[Verb], posted: Nanos) -> InFlight<'e> {
        let deadline = posted.saturating_add(self.region.constants.lateness_ns);
        self.handle().chain(self.lane, verbs, posted, deadline)
    }

    /// As [`Operation::chain`], for a caller that has seen that the client trusts the server.
    #[inline]
    pub(crate) fn post(&self, verbs: &[Verb], posted: Nanos) -> InFlight<'e> {
        let deadline = posted.saturating_add(self.region.constants.lateness_ns);
        self.handle().post(self.lane, verbs, deadline)
    }

    /// Pauses before the next attempt, after other clients disturbed this one. The pause is random,
    /// so that two clients do not disturb each other again and again. It doubles with each attempt.
    ///
    /// # Errors
    /// [`OperationError::Contended`] after [`ATTEMPTS_MAX`] attempts, or if the attempts have READ
    /// too many bytes.
    pub(crate) async fn try_again(&self, tries: &mut RetryState) -> ProtocolResult<()> {
        let read_bytes = self.engine.endpoint.fabric().lane_counters(self.lane).read_bytes;
        let attempts = tries.attempts;
        if attempts == ATTEMPTS_MAX || tries.have_read_too_much(read_bytes) {
            return Err(OperationError::Contended { attempts }.into());
        }
        self.handle().count_retry(RetryReason::Conflict);
        let backoff = self.region.constants.backoff_ns << attempts.min(BACKOFF_DOUBLINGS_MAX);
        let pause = self.engine.random.below(backoff);
        self.engine.endpoint.sleep_until(self.lane, self.now() + pause).await;
        *tries = tries.next();
        Ok(())
    }

    /// Pauses before the operation READs a word again that a split is moving. A move takes
    /// microseconds, unless the server was stopped during the split.
    ///
    /// # Errors
    /// [`OperationError::Contended`] if the move takes too long.
    pub(crate) async fn wait_for_split(&self, tries: &mut RetryState) -> ProtocolResult<()> {
        let now = self.now();
        if tries.move_wait.is_none() {
            self.handle().count_retry(RetryReason::Split);
        }
        let move_wait = tries.move_wait.get_or_insert_with(|| WaitTimer::since(now));
        move_wait.advance(now);
        if self.region.allocator().is_lost() {
            return Err(Failure::Lost(self.region.index));
        }
        if has_timed_out(move_wait) {
            return Err(self.contended());
        }
        let pause = move_wait.waited().clamp(MOVING_PAUSE_NS_MIN, MOVING_PAUSE_NS_MAX);
        self.engine.endpoint.sleep_until(self.lane, now + pause).await;
        Ok(())
    }

    pub(crate) fn contended(&self) -> Failure {
        OperationError::Contended { attempts: ATTEMPTS_MAX }.into()
    }

    /// READs a block into [`Buffer::ReadBlock`]. One round trip.
    pub(crate) async fn read_block(&self, block: BlockRef) -> ProtocolResult<()> {
        let read = read_block(block, block.class.block_bytes());
        self.handle().read(self.lane, &[read]).await
    }

    /// Checks a block of which this many bytes were READ.
    #[inline]
    pub(crate) fn examine(&self, block: BlockRef, bytes_read: u64) -> ExaminedBlock {
        let fabric = self.engine.endpoint.fabric();
        let bytes = &fabric.buffer(self.lane, Buffer::ReadBlock)[..bytes_read as usize];
        let key = self.key_in(&fabric);
        match Block::of_key(bytes, block, key) {
            Some(found) => {
                ExaminedBlock::Ours(Found::new(block.address, &found), found.header_word())
            }
            None => examine_other(bytes, block, key),
        }
    }

    /// The key, in the lane's buffer.
    #[inline]
    pub(crate) fn key_in<'f>(&self, fabric: &'f F) -> &'f [u8] {
        staged_key(fabric, self.lane, self.key_bytes)
    }

    /// The key's slot, by the location cache.
    #[inline(always)]
    pub(crate) fn cached_target(&self) -> Option<ProvenSlot> {
        self.cached_location().map(|(_, target)| target)
    }

    /// The cached location of the key, and its slot.
    // Without `always` the compiler makes a call of it, in every PUT.
    #[inline(always)]
    pub(crate) fn cached_location(&self) -> Option<(FoundEntry<'e>, ProvenSlot)> {
        let (entry, proved_at) = self.region.cache.get_proved(self.hash)?;
        let unpacked = entry.1.location(self.hash, proved_at).ok()?;
        Some((entry, ProvenSlot::located(unpacked, self.window())))
    }

    /// The slot in which this operation's last GET found the key.
    pub(crate) fn located_target(&self) -> Option<ProvenSlot> {
        let (location, window) = self.located.get()?;
        Some(ProvenSlot::located(location, window.unwrap_or_else(|| self.window())))
    }

    /// The byte offset of the key's window, by the directory.
    #[inline]
    pub(crate) fn window(&self) -> u64 {
        self.region.directory().window(self.hash).0
    }
}

/// The result for a block that [`Block::of_key`] refuses.
#[cold]
fn examine_other(bytes: &[u8], block: BlockRef, key: &[u8]) -> ExaminedBlock {
    let found = match Block::decode(bytes, block.address) {
        Ok(found) => found,
        Err(error) => return ExaminedBlock::Damaged(error),
    };
    let generation = found.header_word().generation;
    if !block.has_generation(generation) {
        let (field, value) = ("generation", u64::from(generation));
        return ExaminedBlock::Damaged(LayoutError::Field { field, value });
    }
    if found.key() != key {
        return ExaminedBlock::Other;
    }
    let (field, value) = ("class", u64::from(block.class.index()));
    ExaminedBlock::Damaged(LayoutError::Field { field, value })
}

/// The key of this length that [`Operation::fill`] copied into the lane's buffer.
#[inline]
pub fn staged_key<F: Fabric>(fabric: &F, lane: LaneId, key_bytes: usize) -> &[u8] {
    &fabric.buffer(lane, Buffer::NewBlock)[BLOCK_HEADER_BYTES as usize..][..key_bytes]
}

/// The READ of this many bytes from the start of a block.
pub(crate) fn read_block(block: BlockRef, bytes: u64) -> Verb {
    Verb::Read { remote: block.offset(), into: Buffer::ReadBlock, bytes: bytes as u32 }
}

/// Whether a split is moving the entry, which only the splitter changes now (invariant I15): the
/// operation has to wait and read the word again.
pub(crate) fn is_moving(word: SlotWord) -> bool {
    matches!(word.state(), SlotState::Frozen | SlotState::Copy)
}
