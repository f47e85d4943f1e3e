//! YCSB's standard workloads as mixes of operations.

use std::fmt;
use std::str::FromStr;

use crate::distribution::Shape;

/// What is counted and timed by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Reads a value.
    Get,
    /// Stores a value, over an old one if there is one.
    Put,
    /// Stores the value of a new key.
    Insert,
    /// Removes a key.
    Delete,
    /// A GET, then a PUT of the same key; timed as one.
    Rmw,
}

impl Kind {
    /// How many kinds there are.
    pub const COUNT: usize = 5;
    /// All of them, in the order of [`Kind::index`].
    pub const ALL: [Self; Self::COUNT] =
        [Self::Get, Self::Put, Self::Insert, Self::Delete, Self::Rmw];

    /// A number below [`Kind::COUNT`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::Put => "put",
            Self::Insert => "insert",
            Self::Delete => "delete",
            Self::Rmw => "rmw",
        }
    }
}

/// How many of a hundred operations are of which kind. The numbers add up to 100.
pub type Mix = &'static [(Kind, u32)];

/// A standard workload of YCSB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Half reads, half updates.
    A,
    /// Mostly reads, some updates.
    B,
    /// Only reads.
    C,
    /// Reads of what was inserted last.
    D,
    /// Half reads, half read-modify-writes.
    F,
}

/// Why a text names no workload that can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkloadError {
    /// Workload E.
    #[error("workload e needs range scans, and a hash index has no order to scan in")]
    NeedsRanges,
    /// No such workload.
    #[error("there are the workloads a, b, c, d and f")]
    Unknown,
}

impl Workload {
    /// The operations it consists of.
    pub const fn mix(self) -> Mix {
        match self {
            Self::A => &[(Kind::Get, 50), (Kind::Put, 50)],
            Self::B => &[(Kind::Get, 95), (Kind::Put, 5)],
            Self::C => &[(Kind::Get, 100)],
            Self::D => &[(Kind::Get, 95), (Kind::Insert, 5)],
            Self::F => &[(Kind::Get, 50), (Kind::Rmw, 50)],
        }
    }

    /// The distribution that YCSB gives it.
    pub const fn default_shape(self) -> Shape {
        match self {
            Self::D => Shape::Latest,
            _ => Shape::Zipfian,
        }
    }

    /// How many of a hundred operations are of this kind.
    pub fn percent(self, kind: Kind) -> u32 {
        self.mix().iter().filter(|(of, _)| *of == kind).map(|(_, percent)| percent).sum()
    }
}

impl FromStr for Workload {
    type Err = WorkloadError;

    fn from_str(text: &str) -> Result<Self, WorkloadError> {
        match text.to_ascii_lowercase().as_str() {
            "a" => Ok(Self::A),
            "b" => Ok(Self::B),
            "c" => Ok(Self::C),
            "d" => Ok(Self::D),
            "e" => Err(WorkloadError::NeedsRanges),
            "f" => Ok(Self::F),
            _ => Err(WorkloadError::Unknown),
        }
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::A => "a",
            Self::B => "b",
            Self::C => "c",
            Self::D => "d",
            Self::F => "f",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workloads_come_back_and_e_is_refused_with_the_reason() {
        for name in ["a", "b", "c", "d", "f"] {
            let workload: Workload = name.parse().unwrap();
            assert_eq!(workload.to_string(), name);
            assert_eq!(name.to_uppercase().parse(), Ok(workload));
            assert_eq!(workload.mix().iter().map(|(_, percent)| percent).sum::<u32>(), 100);
        }
        let error = "e".parse::<Workload>().unwrap_err();
        assert!(error.to_string().contains("range scans"), "{error}");
        for text in ["", "g", "aa"] {
            assert_eq!(text.parse::<Workload>(), Err(WorkloadError::Unknown));
        }
    }

    #[test]
    fn kinds_know_their_place() {
        for (index, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind.index(), index);
        }
        assert_eq!(Workload::D.percent(Kind::Insert), 5);
        assert_eq!(Workload::C.percent(Kind::Put), 0);
    }
}
