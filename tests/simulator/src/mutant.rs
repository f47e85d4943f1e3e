//! The mutants of the protocol: each breaks one rule.

use crate::region::Key;

/// A protocol with one rule broken. The rule's number in `docs/protocol.md` is in parentheses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// A writer sets the mark after its compare-and-swap (I2).
    MarkAfterSwap,
    /// A writer sets no mark (I2).
    NoMark,
    /// A writer WRITEs the mark as a whole word, with the generation that it knew (I9).
    MarkOfEightBytes,
    /// Readers ignore the mark (I2).
    MarkIgnored,
    /// Readers ignore the generation (I10).
    GenerationIgnored,
    /// Readers ignore the checksum. This breaks no rule: the checksum is a safety net for I3.
    NoChecksum,
    /// The clock runs fast: GRACE is over at once (I3).
    FastClock,
    /// The clock stands still, and readers ignore the checksum: a READ never expires (I3).
    StoppedClock,
    /// The clock stands still: proofs do not age (I4), READs take no time (I7).
    StoppedClockOnly,
    /// A compare-and-swap is a load and a store (I11).
    SwapInTwo,
    /// INSERT, of this key, does not claim its slot (I8).
    NoClaim(Key),
    /// INSERT reads the window before it claims a slot, not after (I8).
    LooksTooEarly,
    /// INSERT aborts no other inserter (I8).
    NoneAborted,
    /// INSERT continues although the slot that it wanted to abort is LIVE (I8).
    GoesOnAfterLive,
    /// INSERT of this key writes the hint before it claims the slot (I6).
    HintBeforePending(Key),
    /// Aborting an INSERT empties its slot (I6).
    AbortsToEmpty,
    /// An inserter takes a slot that is ABORTED (I6).
    TakesAborted,
    /// An INSERT that withdraws keeps the hint in the slot. So do 60 more, after which the
    /// incarnation number recurs (I6).
    WithdrawKeepsHint,
    /// An INSERT that withdraws clears the hint. So do 60 more, after which the incarnation number
    /// recurs. This breaks no rule.
    WithdrawOften,
    /// INSERT of this key takes a slot that the hint of another INSERT claims, in the incarnation
    /// of the other INSERT's hint (I21).
    FirstIncarnationTwice(Key),
    /// The slots of a reused place look unused (I21).
    ReusedPlaceLooksUnused,
    /// The incarnation number of a slot does not rise (I5).
    SameIncarnation,
    /// Between a DELETE and the next INSERT there are 61 incarnations that take no time (I7).
    IncarnationsInNoTime,
    /// INSERT's second READ of the window believes every hint that is not this key's (I12).
    EveryMismatchBelieved(Key),
    /// A client gets the same blocks as the first client (I1).
    BlocksOfTwoOwners,
    /// PUT of this key counts as overwritten by the word that it finds instead of the cached one,
    /// although it has READ no other word in the slot (I23).
    AbsorbedUnread(Key),
    /// The time that a chain spends in its queue does not count for its deadline (I4, I13).
    QueueUncounted,
    /// Patience is GRACE, without a margin for clocks that drift. Readers ignore the checksum (I3).
    PatienceWithoutMargin,
    /// T_word + L is 256 times GRACE, without a margin for clocks that drift (I4).
    ProofWithoutMargin,
    /// The server does not fence a client that was paused (I4).
    NeverFenced,
    /// The server fences a client that was paused only after four times the timeout (I4).
    FencedLate,
    /// The depot gives blocks to clients before they have rested for GRACE (I3).
    GivenAtOnce,
    /// A chunk may change its class GRACE after its last block was returned (I13).
    ChunkRestsForGrace,
    /// A chunk changes its class, but the headers of the new class are not written (I10, I13).
    HeadersNotWritten,
    /// The server clears the slots of a lost client without fencing it (I6).
    Unfenced,
    /// The server clears the slots of living clients (I6).
    SweepsTheLiving,
    /// The server clears a slot before its hint (I6).
    HintAfterClear,
    /// The server does not fence the clients that were connected before its restart (I6).
    FormerClientsNotFenced,
    /// The server clears a tombstone at once, not GRACE later. This breaks no rule: no answer of an
    /// operation depends on TOMB instead of EMPTY.
    TombClearedAtOnce,
    /// PUT counts as overwritten by the removal of its key by the server (I23).
    AbsorbedByTomb,
    /// The server removes whatever value the slot has when it posts its chain, not the value that
    /// it read (I4).
    ReplacedRemoved,
    /// The server removes a key although it read the word more than T_word ago (I4).
    RemovedByOldProof,
    /// The server gives the block of a removed key another owner with its old generation (I2).
    RemovedGenerationKept,
    /// The server removes a value before it expires (I19).
    ExpiresEarly,
    /// A client ignores when values expire (I19).
    ExpiryIgnored,
    /// A session does not hold the extents of a head when it unlinks the head (I27).
    OldExtentsUnheld,
    /// An operation that depends on the present value assembles the new one over its own key and
    /// value (I28).
    InputOverwritten,
    /// After a lost connection, a change that may have happened counts as not done.
    UnknownIsNothing,
    /// PUT counts as overwritten by a conditional operation.
    AbsorbedByConditional,
    /// A modification that lost its slot tries again with the value and the expiry that it READ
    /// first (I4).
    FirstBlockKept,
    /// PUT relies on an old READ of the window when it decides that it was overwritten.
    AbsorbedByOldWindow,
    /// A DELETE that lost to a PUT reports that it removed the key.
    DeleteAbsorbed,
    /// A reader checks only once whether a block with a stale mark is still linked.
    StaleMarkBelieved,
    /// GET believes that the slot leads to the block that a mark names (I22).
    SuccessorBelieved,
    /// PUT of this key believes that the word to which it lost belongs to its key (I22).
    FoundBelieved(Key),
    /// The splitter removes an entry from the old subtable before the new one has it (I14).
    MovedBeforeCopy,
    /// The splitter writes an entry's hint after the entry is LIVE in the new subtable (I14).
    HintAfterLive,
    /// A reader READs the new subtable first, then the old one (I14).
    NewBeforeOld,
    /// The splitter copies entries without freezing them, so clients can change them (I15).
    NotFrozen,
    /// An entry is LIVE in the new subtable before it is removed from the old one (I1).
    LiveBeforeMoved,
    /// INSERT's second READ of the window ignores that a split has begun (I16).
    ForwardIgnored,
    /// The place of a subtable is reused before GRACE is over (I18).
    ReusedAtOnce,
    /// The headers of new subtables do not show that they are being filled (I17).
    NeverFilling,
    /// An interrupted split that continues fills a subtable that clients already use (I17).
    FillsAgain,
    /// A client posts chains although it does not trust the server any more (I24).
    TrustIgnored,
    /// An answer to a heartbeat extends the trust from the time at which it arrives, not from the
    /// time at which the heartbeat was sent (I24).
    TrustFromAnswer,
    /// The operator gives a shard another region at once (I25).
    ReassignedAtOnce,
    /// The operator waits for trust and L, without a margin for clocks that differ (I25).
    DistrustWithoutMargin,
    /// The operator counts its wait from the revocation on, although the server answered later and
    /// did not give the shard up (I25).
    AnswerUncounted,
    /// A server that stood still for long answers clients before it has read the records (I25).
    UnconfirmedAnswers,
    /// The data of a READ counts however old it is (I3).
    PatienceWithoutEnd,
    /// A map with an older view replaces a newer one (I25).
    OlderViewTaken,
    /// A change of two regions relies on the first region, which may be ahead of the second.
    HeadBelieved,
}

impl Mutant {
    /// Whether a reader takes every content for whole.
    pub(crate) fn ignores_checksums(self) -> bool {
        matches!(self, Self::NoChecksum | Self::PatienceWithoutMargin | Self::StoppedClock)
    }

    /// Whether the mutant changes the time that the client sees.
    pub(crate) fn has_false_clock(self) -> bool {
        matches!(self, Self::FastClock | Self::StoppedClock | Self::StoppedClockOnly)
    }
}
