//! A session of the simulation: production code that the scheduler polls.

use farside_fabric::{Buffer, Endpoint, Fabric, LaneId, Nanos, RegionIndex};
use farside_layout::{FreeBlock, SizeClass, SplitOutcome};
use farside_protocol::allocator::{BlockDelivery, BlockSource, Delivery};
use farside_protocol::{
    Action, Answer, ConnectionCache, Engine, Expected, Failure, LANE, Lifetime, OpenRegion,
    Operation, OperationError, Prefix, RegionOptions, Version,
};
use send_wrapper::SendWrapper;

const FOREVER: Lifetime = Lifetime::Forever;

/// The server's part in a session's blocks and splits.
pub(super) trait Blocks {
    /// Answers a request for `count` blocks at once, with fewer if there are no more.
    fn take(&mut self, class: SizeClass, count: u32) -> Vec<FreeBlock>;

    /// Takes blocks back. `rested`: they have been unlinked for GRACE.
    fn give(&mut self, class: SizeClass, rested: bool, blocks: Vec<FreeBlock>);

    /// Returns the outcome of a requested split of a subtable with this depth, once it is known.
    fn split_outcome(&mut self, local_depth: u8) -> Option<SplitOutcome>;
}

/// A location cache that sessions can share.
#[derive(Default)]
pub(super) struct Locations(ConnectionCache);

struct Supply {
    /// The simulator has one thread.
    blocks: SendWrapper<Box<dyn Blocks>>,
    answers: Vec<Delivery>,
    /// The requested splits that await their outcome.
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

/// An operation on a key.
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

/// The answer to an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    /// A GET found the key, or the change was made.
    pub(super) done: bool,
    /// The value that a GET found, or that an exchange found instead of the expected one.
    pub(super) found: Option<(Vec<u8>, Version)>,
}

/// A session over the test's fabric.
pub(super) struct TestSession<F: Fabric> {
    engine: Engine<F>,
    region: OpenRegion,
}

impl<F: Fabric> TestSession<F> {
    /// Reads the superblock and the directory. `wall` also seeds the random numbers.
    ///
    /// # Errors
    /// The reason why the region cannot be opened.
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

    /// Makes INSERTs of this key blind. The next one claims this slot of the home row.
    pub(super) fn expect_room(&self, key: &[u8], slot: usize) {
        self.engine.at(&self.region).expect_room(key, slot);
    }

    /// The session's endpoint.
    pub(super) fn endpoint(&self) -> &Endpoint<F> {
        &self.engine.endpoint
    }

    /// Requests blocks of this class before the first operation needs one.
    ///
    /// # Errors
    /// [`OperationError::OutOfSpace`].
    pub(super) fn fetch_blocks(&self, class: SizeClass) -> Result<(), Option<OperationError>> {
        let taken =
            self.engine.endpoint.drive(self.engine.at(&self.region).take_block(LANE, class));
        self.region.allocator().put_back(LANE, class, taken.map_err(error)?.0);
        Ok(())
    }

    /// Performs one operation on a lane.
    ///
    /// # Errors
    /// The operation's error, or `None` if the connection was lost.
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

    /// Returns the session's constants of `docs/protocol.md`: GRACE, patience, T_hint, T_word.
    pub(super) fn constants(&self) -> [Nanos; 4] {
        let constants = &self.region.constants;
        [
            constants.grace_ns,
            constants.patience_ns,
            constants.exact_hint_read_ns_max,
            constants.proof_age_ns_max,
        ]
    }

    /// Returns all free blocks to the server, as a session does on request.
    pub(super) fn give_back(&self) {
        self.engine.at(&self.region).receive();
        self.region.allocator().give_all();
    }

    /// Sets the [constants](TestSession::constants), for mutants with other ones.
    pub(super) fn set_constants(&mut self, [grace, patience, hint, word]: [Nanos; 4]) {
        let constants = &mut self.region.constants;
        (constants.grace_ns, constants.patience_ns) = (grace, patience);
        (constants.exact_hint_read_ns_max, constants.proof_age_ns_max) = (hint, word);
    }

    /// Mixes the location cache into a hash.
    pub(super) fn hash_locations(&self, hasher: &mut impl std::hash::Hasher) {
        self.region.cache.hash_state(hasher);
    }

    /// Mixes all state on which later operations depend into a hash: cache, free blocks and random
    /// numbers. The state of operations in flight is left out.
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
