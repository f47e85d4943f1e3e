//! A session of the simulation: production code, driven from outside.

use farside_fabric::{Buffer, Endpoint, Fabric, LaneId, Nanos, RegionIndex};
use farside_layout::{FreeBlock, SizeClass, SplitOutcome};
use farside_protocol::allocator::{BlockDelivery, BlockSource, Delivery};
use farside_protocol::{
    Action, Answer, ConnectionCache, Engine, Expected, Failure, LANE, Lifetime, OpenRegion,
    Operation, OperationError, Prefix, RegionOptions, Version,
};
use send_wrapper::SendWrapper;

const FOREVER: Lifetime = Lifetime::Forever;

/// Where a rig's blocks come from and go to.
pub(super) trait Blocks {
    /// The answer to a request for so many, at once; fewer if there are no more.
    fn take(&mut self, class: SizeClass, count: u32) -> Vec<FreeBlock>;

    /// Gets blocks back. `rested`: unlinked for GRACE already.
    fn give(&mut self, class: SizeClass, rested: bool, blocks: Vec<FreeBlock>);

    /// The answer to a request for a split of a subtable that goes by so many bits, once there is
    /// one.
    fn split_outcome(&mut self, local_depth: u8) -> Option<SplitOutcome>;
}

/// Where rigs that share it last saw their keys, as the sessions of a client do.
#[derive(Default)]
pub(super) struct Locations(ConnectionCache);

struct Supply {
    /// The simulator has one thread.
    blocks: SendWrapper<Box<dyn Blocks>>,
    answers: Vec<Delivery>,
    /// Splits that were asked for and not answered yet.
    asked: Vec<Prefix>,
}

impl BlockSource for Supply {
    fn request(&mut self, class: SizeClass, count: u32) {
        let blocks = (*self.blocks).take(class, count);
        let delivered = BlockDelivery { class, rested: true, soon: false, blocks };
        self.answers.push(Delivery::Blocks(delivered));
    }

    fn request_split(&mut self, prefix: Prefix) {
        self.asked.push(prefix);
    }

    fn receive(&mut self) -> Option<Delivery> {
        let Self { blocks, answers, asked } = self;
        asked.retain(|prefix| match blocks.split_outcome(prefix.local_depth) {
            Some(outcome) => {
                answers.push(Delivery::Split(*prefix, outcome));
                false
            }
            None => true,
        });
        self.answers.pop()
    }

    fn give(&mut self, class: SizeClass, rested: bool, blocks: Vec<FreeBlock>) {
        self.blocks.give(class, rested, blocks);
    }

    fn is_lost(&self) -> bool {
        false
    }
}

/// What to do with a key.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the operations of `Session`")]
pub(super) enum Call<'v> {
    Get,
    Put(&'v [u8]),
    Insert(&'v [u8]),
    Update(&'v [u8]),
    Delete,
    Exchange { expected: &'v [u8], value: &'v [u8] },
    ExchangeVersion { expected: Version, value: &'v [u8] },
}

/// What became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    /// A GET found the key, or the change was made.
    pub(super) done: bool,
    /// What a GET found, or an exchange instead of what it expected.
    pub(super) found: Option<(Vec<u8>, Version)>,
}

/// What a session has, over a fabric of the test's.
pub(super) struct TestSession<F: Fabric> {
    engine: Engine<F>,
    region: OpenRegion,
}

impl<F: Fabric> TestSession<F> {
    /// Reads superblock and directory. `wall` also seeds the random numbers.
    ///
    /// # Errors
    /// What is wrong with the region.
    pub(super) fn open(
        (fabric, lanes): (F, u16),
        blocks: Box<dyn Blocks>,
        options: RegionOptions,
        locations: &Locations,
        wall: u64,
    ) -> Result<Self, Option<OperationError>> {
        let supply =
            Supply { blocks: SendWrapper::new(blocks), answers: Vec::new(), asked: Vec::new() };
        let engine = Engine::new_at(fabric, lanes, wall);
        let region = engine.open(RegionIndex::FIRST, Box::new(supply), options, &locations.0);
        let region = region.map_err(error)?;
        Ok(Self { engine, region })
    }

    /// INSERTs of this key claim a slot without having looked, the next one this slot of the row.
    pub(super) fn expect_room(&self, key: &[u8], slot: usize) {
        self.engine.at(&self.region).expect_room(key, slot);
    }

    /// The endpoint that polls and completes.
    pub(super) fn endpoint(&self) -> &Endpoint<F> {
        &self.engine.endpoint
    }

    /// Asks for blocks for a key and a value of these lengths before the first operation needs one.
    ///
    /// # Errors
    /// [`OperationError::OutOfSpace`].
    pub(super) fn fetch_blocks(&self, class: SizeClass) -> Result<(), Option<OperationError>> {
        let taken =
            self.engine.endpoint.drive(self.engine.at(&self.region).take_block(LANE, class));
        self.region.allocator().put_back(LANE, class, taken.map_err(error)?.0);
        Ok(())
    }

    /// One operation on a lane.
    ///
    /// # Errors
    /// The operation's; `None` if the connection was lost.
    pub(super) async fn run(
        &self,
        lane: LaneId,
        call: Call<'_>,
        key: &[u8],
    ) -> Result<Reply, Option<OperationError>> {
        let (action, value) = match call {
            Call::Get => (Action::Get, &[][..]),
            Call::Put(value) => (Action::Put(FOREVER), value),
            Call::Insert(value) => (Action::Insert(FOREVER), value),
            Call::Update(value) => (Action::Update(FOREVER), value),
            Call::Delete => (Action::Delete, &[][..]),
            Call::Exchange { expected, value } => {
                (Action::Exchange(Expected::Value(expected), FOREVER), value)
            }
            Call::ExchangeVersion { expected, value } => {
                (Action::Exchange(Expected::Version(expected), FOREVER), value)
            }
        };
        self.region.check_key(key).map_err(Some)?;
        self.region.check_value(value).map_err(Some)?;
        let operation = Operation::stage(self.engine.at(&self.region), lane, key, value);
        let Answer { applied, found } = operation.perform(action).await.map_err(error)?;
        let buffer = self.engine.endpoint.buffer(lane, Buffer::ReadBlock);
        let found = found.map(|found| (found.value_in(&buffer).to_vec(), found.version));
        Ok(Reply { done: applied && (action.changes() || found.is_some()), found })
    }

    /// What the constants of `docs/protocol.md` are here: GRACE, patience, T_hint, T_word.
    pub(super) fn constants(&self) -> [Nanos; 4] {
        let constants = &self.region.constants;
        [
            constants.grace_ns,
            constants.patience_ns,
            constants.exact_hint_read_ns_max,
            constants.proof_age_ns_max,
        ]
    }

    /// Gives the server all free blocks, as a session does that is asked to.
    pub(super) fn give_back(&self) {
        self.engine.at(&self.region).receive();
        self.region.allocator().give_all();
    }

    /// Sets what [`TestSession::constants`] returns: for protocols with other constants.
    pub(super) fn set_constants(&mut self, [grace, patience, hint, word]: [Nanos; 4]) {
        let constants = &mut self.region.constants;
        (constants.grace_ns, constants.patience_ns) = (grace, patience);
        (constants.exact_hint_read_ns_max, constants.proof_age_ns_max) = (hint, word);
    }

    /// Mixes what the location cache remembers into a hash.
    pub(super) fn hash_locations(&self, hasher: &mut impl std::hash::Hasher) {
        self.region.cache.hash_state(hasher);
    }

    /// Mixes everything that later operations depend on into a hash: cache, free blocks, random
    /// numbers. Not what operations in flight remember.
    pub(super) fn hash_state(&self, hasher: &mut impl std::hash::Hasher) {
        self.engine.at(&self.region).hash_state(hasher);
    }
}

fn error(failure: Failure) -> Option<OperationError> {
    match failure {
        Failure::Error(error) => Some(*error),
        Failure::Lost(_) | Failure::HalfDone { .. } | Failure::NoAnswer(_) => None,
    }
}
