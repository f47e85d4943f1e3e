//! `kv-bench report`: a self-contained HTML page of results, with charts as SVG.

pub(crate) mod chart;
mod figures;
mod page;
pub(crate) mod scale;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::args::Report;
use crate::publish::{check_file, is_same_file, write_whole};
use crate::report::YcsbReport;
use crate::verbs::VerbsReport;
use crate::{Error, Result};

/// Reads all results, then writes the page. Returns the message for stdout. Passes a line about
/// each skipped file to `tell`.
///
/// # Errors
/// [`Error::Input`] as [`Inputs::read`]. [`Error::Usage`] and [`Error::Output`] if the page cannot
/// be written.
pub fn report(args: &Report, tell: impl Fn(&str)) -> Result<String> {
    check_file(&args.output)?;
    let inputs = Inputs::read(&args.results)?;
    if inputs.files.iter().any(|file| is_same_file(file, &args.output)) {
        let output = args.output.display();
        return Err(Error::Usage(format!(
            "the page would replace the result {output}: name another file with -o"
        )));
    }
    for file in &inputs.skipped {
        tell(&format!("skipped {}: not a result of ycsb or verbs", file.display()));
    }
    write_whole(&args.output, page::page(&inputs).as_bytes())?;
    let results = inputs.files.len();
    Ok(format!("{}: a page of {results} result(s)\n", args.output.display()))
}

const NO_RESULT: &str = "neither a result of `kv-bench ycsb --json` nor of `kv-bench verbs --json`";

/// All results, each with the name of its file.
#[derive(Default)]
pub struct Inputs {
    /// Results of `kv-bench ycsb`.
    pub ycsb: Vec<(String, YcsbReport)>,
    /// Results of `kv-bench verbs`.
    pub verbs: Vec<(String, VerbsReport)>,
    /// The files of all these results.
    pub files: Vec<PathBuf>,
    /// Files in folders that are other JSON, such as what `kv-compare` writes.
    pub skipped: Vec<PathBuf>,
}

impl Inputs {
    /// Reads files, and every `.json` in folders and their subfolders.
    ///
    /// # Errors
    /// [`Error::Input`] with the first file that cannot be read, the first named file that is no
    /// result, or the first folder that contains no result.
    pub fn read(paths: &[PathBuf]) -> Result<Self> {
        let mut inputs = Self::default();
        for path in paths {
            let (mut files, count_before) = (Vec::new(), inputs.files.len());
            find(path, &mut files)?;
            for file in files {
                if inputs.add(&file)? {
                    inputs.files.push(file);
                } else if file == *path {
                    return Err(Error::input(path)(NO_RESULT));
                } else {
                    inputs.skipped.push(file);
                }
            }
            if inputs.files.len() == count_before {
                return Err(Error::input(path)("no .json in this folder is a result"));
            }
        }
        Ok(inputs)
    }

    /// Reads a file. Returns whether it is a result.
    fn add(&mut self, path: &Path) -> Result<bool> {
        let bytes = fs::read(path).map_err(Error::input(path))?;
        let json: Value = serde_json::from_slice(&bytes).map_err(Error::input(path))?;
        let name = path.display().to_string();
        if json.get("workload").is_some() {
            let report: YcsbReport = parsed(path, json)?;
            let is_whole = report.seconds > 0.0 && report.throughput_ops_s > 0.0;
            if !is_whole || report.count() == 0 {
                return Err(Error::input(path)("this run has no operations"));
            }
            self.ycsb.push((name, report));
        } else if json.get("update").is_some() {
            self.verbs.push((name, parsed(path, json)?));
        } else {
            return Ok(false);
        }
        Ok(true)
    }
}

fn parsed<T: DeserializeOwned>(path: &Path, json: Value) -> Result<T> {
    serde_json::from_value(json).map_err(Error::input(path))
}

/// Finds the file itself, or the files in the folder, sorted by name.
fn find(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if !path.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    let entries = fs::read_dir(path).map_err(Error::input(path))?;
    let entries: std::io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.path())).collect();
    let mut entries = entries.map_err(Error::input(path))?;
    entries.sort();
    for entry in entries {
        // Links to folders are skipped, because one may lead back here.
        let is_folder = entry.is_dir() && !entry.is_symlink();
        if is_folder || entry.extension().is_some_and(|extension| extension == "json") {
            find(&entry, files)?;
        }
    }
    Ok(())
}
