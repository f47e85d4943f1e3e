//! The properties of upstream YCSB, from files and from the command line.

use std::collections::BTreeMap;
use std::fs;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use clap::ValueEnum;

use crate::distribution::Shape;
use crate::records::{VALUE_BYTES_MAX, ValueSize};
use crate::workload::{Kind, Mix, NEEDS_RANGES};

/// A name and a value.
#[derive(Clone, Debug)]
pub struct Property {
    name: String,
    value: String,
}

impl FromStr for Property {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // As in Java, the first of the two characters separates.
        let (name, value) = text.split_once(['=', ':']).ok_or("write name=value")?;
        Ok(Self { name: name.trim().to_owned(), value: value.trim().to_owned() })
    }
}

/// Properties by name, each with its value and its origin: a file, or `-p`.
pub struct Properties(BTreeMap<String, (String, String)>);

/// The properties that have an effect on a run.
const USED: [&str; 15] = [
    "recordcount",
    "operationcount",
    "maxexecutiontime",
    "threadcount",
    "target",
    "readproportion",
    "updateproportion",
    "insertproportion",
    "scanproportion",
    "readmodifywriteproportion",
    "requestdistribution",
    "hotspotdatafraction",
    "hotspotopnfraction",
    "fieldcount",
    "fieldlength",
];
/// Properties without an effect here: whole values are read and written, there is one table, and
/// scans are refused.
const WITHOUT_EFFECT: [&str; 6] = [
    "table",
    "readallfields",
    "writeallfields",
    "minscanlength",
    "maxscanlength",
    "scanlengthdistribution",
];
/// Properties with only one meaning here, each with the values that stand for it.
const FIXED: [(&str, &[&str]); 3] = [
    ("workload", &["site.ycsb.workloads.CoreWorkload", "com.yahoo.ycsb.workloads.CoreWorkload"]),
    ("insertorder", &["hashed"]),
    ("fieldlengthdistribution", &["constant"]),
];

impl Properties {
    /// Reads these files. A single property replaces one from a file, and a later file replaces
    /// those of earlier files.
    pub fn read(files: &[PathBuf], single: &[Property]) -> Result<Self, String> {
        let mut all = BTreeMap::new();
        for path in files {
            let path = path.display();
            let text = fs::read_to_string(path.to_string());
            let text = text.map_err(|error| format!("{path}: {error}"))?;
            for (number, line) in (1..).zip(text.lines().map(str::trim)) {
                if line.is_empty() || line.starts_with(['#', '!']) {
                    continue;
                }
                let property = line.parse::<Property>();
                let Property { name, value } =
                    property.map_err(|advice| format!("{path}, line {number}: {advice}"))?;
                all.insert(name, (value, path.to_string()));
            }
        }
        for Property { name, value } in single.iter().cloned() {
            all.insert(name, (value, "-p".to_owned()));
        }
        Ok(Self(all))
    }

    /// Returns the names of the properties that kv-bench does not know.
    pub fn unknown(&self) -> Vec<String> {
        let is_known = |name: &str| {
            let is_fixed = FIXED.iter().any(|(fixed, _)| *fixed == name);
            USED.contains(&name) || WITHOUT_EFFECT.contains(&name) || is_fixed
        };
        self.0.keys().filter(|name| !is_known(name)).cloned().collect()
    }

    /// Checks the properties that may have only one value here.
    pub fn check(&self) -> Result<(), String> {
        for (name, values) in FIXED {
            if self.value(name).is_some_and(|value| !values.contains(&value)) {
                return Err(self.wrong(name, &format!("the only value here is {}", values[0])));
            }
        }
        Ok(())
    }

    fn value(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|(value, _)| value.as_str())
    }

    fn wrong(&self, name: &str, advice: &str) -> String {
        match self.0.get(name) {
            Some((value, origin)) => format!("{origin}: {name}={value}: {advice}"),
            None => format!("{name}: {advice}"),
        }
    }

    fn parsed<T>(
        &self,
        name: &str,
        advice: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let parse = |value| parse(value).ok_or_else(|| self.wrong(name, advice));
        self.value(name).map(parse).transpose()
    }

    /// The property of this name as a whole number within the range.
    pub fn number(&self, name: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, String> {
        let advice = format!("write a number from {} to {}", range.start(), range.end());
        self.parsed(name, &advice, |text| text.parse().ok().filter(|number| range.contains(number)))
    }

    /// The property of this name as a number from 0 to 1.
    pub fn share(&self, name: &str) -> Result<Option<f64>, String> {
        let is_share = |share: &f64| (0.0..=1.0).contains(share);
        let advice = "write a number from 0 to 1";
        self.parsed(name, advice, |text| text.parse().ok().filter(is_share))
    }

    /// The mix of operations.
    pub fn mix(&self) -> Result<Mix, String> {
        let proportion = |name, default| {
            let is_possible = |number: &f64| *number >= 0.0 && number.is_finite();
            let advice = "write a number of at least 0";
            let number = self.parsed(name, advice, |text| text.parse().ok().filter(is_possible));
            number.map(|number| number.unwrap_or(default))
        };
        if proportion("scanproportion", 0.0)? > 0.0 {
            return Err(self.wrong("scanproportion", NEEDS_RANGES));
        }
        let weights = [
            (Kind::Get, proportion("readproportion", 0.95)?),
            (Kind::Put, proportion("updateproportion", 0.05)?),
            (Kind::Insert, proportion("insertproportion", 0.0)?),
            (Kind::Rmw, proportion("readmodifywriteproportion", 0.0)?),
        ];
        Mix::new(&weights).ok_or_else(|| "the proportions allow no operation".to_owned())
    }

    /// Which records are popular, by upstream's names.
    pub fn shape(&self) -> Result<Shape, String> {
        let advice = "there are uniform, zipfian, latest and hotspot here";
        let shape = |text: &str| match Shape::from_str(text, false).ok()? {
            Shape::Zipfian => Some(Shape::ScrambledZipfian),
            Shape::ScrambledZipfian => None,
            shape => Some(shape),
        };
        let shape = self.parsed("requestdistribution", advice, shape)?;
        Ok(shape.unwrap_or(Shape::Uniform))
    }

    /// The lengths of values: all fields of a record together are one value.
    pub fn value_size(&self) -> Result<ValueSize, String> {
        let count = self.number("fieldcount", 1..=u32::MAX.into())?.unwrap_or(10) as u32;
        let length = self.number("fieldlength", 1..=u32::MAX.into())?.unwrap_or(100) as u32;
        match count.checked_mul(length).filter(|bytes| *bytes <= VALUE_BYTES_MAX) {
            Some(bytes) => Ok(ValueSize::Constant(bytes)),
            None => Err(format!("{count} fields of {length} bytes are longer than a value can be")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn single(properties: &[&str]) -> Properties {
        let single: Vec<Property> = properties.iter().map(|text| text.parse().unwrap()).collect();
        Properties::read(&[], &single).unwrap()
    }

    #[test]
    fn later_lines_win_and_comments_are_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let files = [("one", "# a=1\n\n a = 2\n!x\nb:5"), ("two", "a=3\n")].map(|(name, text)| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        });
        let properties = Properties::read(&files, &[]).unwrap();
        assert_eq!((properties.value("a"), properties.value("b")), (Some("3"), Some("5")));
        assert_eq!(properties.unknown(), ["a", "b"]);
        std::fs::write(&files[0], "a=1\nb\n").unwrap();
        let error = Properties::read(&files, &[]).err().unwrap();
        assert!(error.ends_with("one, line 2: write name=value"), "{error}");
    }

    #[test]
    fn an_error_names_what_to_write_instead() {
        type Read = fn(&Properties) -> Option<String>;
        let mix: Read = |properties| properties.mix().err();
        let size: Read = |properties| properties.value_size().err();
        let shape: Read = |properties| properties.shape().err();
        let check: Read = |properties| properties.check().err();
        for (property, read, part) in [
            ("readproportion=x", mix, "a number of at least 0"),
            ("readproportion=-1", mix, "a number of at least 0"),
            ("scanproportion=0.1", mix, "range scans"),
            ("fieldlength=0", size, "from 1 to"),
            ("fieldcount=1000000", size, "1000000 fields of 100 bytes"),
            ("fieldlengthdistribution=zipfian", check, "the only value here is constant"),
            ("requestdistribution=exponential", shape, "hotspot here"),
            ("insertorder=ordered", check, "the only value here is hashed"),
            ("workload=site.ycsb.workloads.TimeSeriesWorkload", check, "CoreWorkload"),
        ] {
            let error = read(&single(&[property])).unwrap();
            assert!(error.contains(part), "{property}: {error}");
        }
        let nothing = single(&["readproportion=0", "updateproportion=0"]).mix();
        assert!(nothing.err().unwrap().contains("no operation"));
    }
}
