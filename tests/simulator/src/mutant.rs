//! Protocols with a rule broken.

use super::scenario::Key;

/// A protocol with one rule broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// The mark comes after the compare-and-swap (I2).
    MarkAfterSwap,
    /// There is no mark (I2).
    NoMark,
    /// The mark is a whole word, with the generation its writer knew (I9).
    MarkOfEightBytes,
    /// Readers do not look at the mark (I2).
    MarkIgnored,
    /// Readers take whatever generation they find (I10).
    GenerationIgnored,
    /// Readers have no checksum: not a rule of the protocol, but the net below two of them.
    NoChecksum,
    /// The clock runs fast: GRACE is over at once (I3).
    FastClock,
    /// The clock stands still, and the net is gone: an operation believes for ever (I3).
    StoppedClock,
    /// The clock stands still: proofs do not age (I4), READs take no time (I7).
    StoppedClockOnly,
    /// A compare-and-swap is a load and a store (I11).
    SwapInTwo,
    /// INSERT, of this key, does not claim its slot (I8).
    NoClaim(Key),
    /// INSERT looks before it claims, not after (I8).
    LooksTooEarly,
    /// INSERT lets other inserters be (I8).
    NobodyAborted,
    /// INSERT goes on although the one it wanted to abort is LIVE (I8).
    GoesOnAfterLive,
    /// The hint of this key is written before its slot is claimed (I6).
    HintBeforePending(Key),
    /// The one who aborts empties the slot (I6).
    AbortsToEmpty,
    /// An inserter takes a slot that is ABORTED (I6).
    TakesAborted,
    /// A client that withdraws leaves the hint, and so did 60 others (I6).
    WithdrawKeepsHint,
    /// A client that withdraws clears the hint, and so did 60 others: nothing is wrong with that.
    WithdrawOften,
    /// INSERT, of this key, takes a slot that another one's hint claims in the incarnation of that
    /// hint (I21).
    FirstTwice(Key),
    /// A place that is used again has slots that were never used (I21).
    NewAgain,
    /// The number of the incarnation does not rise (I5).
    SameIncarnation,
    /// Between a DELETE and the next INSERT there are 61 incarnations that take no time (I7).
    IncarnationsInNoTime,
    /// INSERT's second look believes every hint that is not this key's (I12).
    EveryMismatchBelieved(Key),
    /// A client is given blocks that the first one has, too (I1).
    BlocksOfTwoOwners,
    /// PUT, of this key, calls itself overwritten by what it finds instead of the cached word,
    /// though it READ no other there (I23).
    AbsorbedUnread(Key),
    /// The time that a chain waits in its queue does not count for its deadline (I4, I13).
    QueueUncounted,
    /// Patience is GRACE, and the net is gone: clocks that drift are not allowed for (I3).
    PatienceWithoutMargin,
    /// T_word and L are 256 times GRACE: clocks that drift are not allowed for (I4).
    ProofWithoutMargin,
    /// The server does not fence a client that was paused (I4).
    NeverFenced,
    /// It does so only after four times as long as it may take (I4).
    FencedLate,
    /// The depot hands out blocks before they have rested (I3).
    GivenAtOnce,
    /// A chunk changes its class GRACE after its last block came back (I13).
    ChunkRestsForGrace,
    /// It does so without headers where the next class has them (I10, I13).
    HeadersNotWritten,
    /// The server clears up after a client that it did not fence (I6).
    Unfenced,
    /// The server clears up after clients that are alive (I6).
    SweepsTheLiving,
    /// The server clears a slot before its hint (I6).
    HintAfterClear,
    /// The server does not fence those from before its restart (I6).
    Unrefused,
    /// What may have happened before a connection broke is taken not to have happened.
    UnknownIsNothing,
    /// PUT calls itself overwritten by a conditional operation.
    AbsorbedByConditional,
    /// PUT relies on a window of long ago to call itself overwritten.
    AbsorbedByOldWindow,
    /// A DELETE that lost to a PUT says that the key was there.
    DeleteAbsorbed,
    /// Whether a marked block is still linked is asked only once.
    PoisonedBelieved,
    /// GET believes that the slot leads where the mark of a block says (I22).
    SuccessorBelieved,
    /// PUT believes that the word it lost to is that of its own key, this one (I22).
    FoundBelieved(Key),
    /// The splitter takes the entry out of the old subtable before the new one has it (I14).
    MovedBeforeCopy,
    /// The splitter writes the hint after the entry is LIVE in the new subtable (I14).
    HintAfterLive,
    /// A reader looks into the new subtable first, then into the old one (I14).
    NewBeforeOld,
    /// The splitter copies entries that every client can change meanwhile (I15).
    NotFrozen,
    /// The entry is LIVE in the new subtable before it is out of the old one (I1).
    LiveBeforeMoved,
    /// INSERT's second look does not see that a split has begun (I16).
    ForwardIgnored,
    /// The place of a subtable is used again before GRACE is over (I18).
    ReusedAtOnce,
    /// New subtables do not say that they are being filled (I17).
    NeverFilling,
    /// A split that goes on after it was interrupted fills what clients use already (I17).
    FillsAgain,
    /// A change of two regions relies on what the first one shows, which the second may not have.
    HeadBelieved,
}

impl Mutant {
    /// Whether what it calls now is not.
    pub(super) fn has_false_clock(self) -> bool {
        matches!(self, Self::FastClock | Self::StoppedClock | Self::StoppedClockOnly)
    }
}
