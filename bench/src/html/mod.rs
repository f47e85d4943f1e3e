//! `kv-bench report`: results as one page of HTML that needs nothing else, with charts as SVG.

mod bars;
mod chart;
mod figures;
mod inputs;
mod page;
mod scale;
mod setting;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use clap::ValueHint;

use crate::publish::{check_file, is_same_file, write_whole};
use crate::{Error, Result};

pub use inputs::Inputs;

/// `kv-bench report`.
#[derive(Clone, Debug, clap::Args)]
pub struct Report {
    /// Files that `ycsb --json` and `verbs --json` wrote, and folders of them
    #[arg(required = true, value_name = "RESULTS", value_hint = ValueHint::AnyPath)]
    pub results: Vec<PathBuf>,
    /// Where the page goes
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    #[arg(value_hint = ValueHint::FilePath)]
    pub output: PathBuf,
}

/// Reads all results, then writes the page. Returns what to tell; tells at once what it skips.
///
/// # Errors
/// [`Error::Input`] with the first file that is no result; [`Error::Usage`] and
/// [`Error::Output`] if the page cannot be written.
pub fn report(args: &Report, tell: impl Fn(&str)) -> Result<String> {
    check_file(&args.output)?;
    let inputs = Inputs::read(&args.results)?;
    if inputs.files.iter().any(|file| is_same_file(file, &args.output)) {
        let output = args.output.display();
        return Err(Error::Usage(format!("the page would replace the result {output}")));
    }
    for file in &inputs.skipped {
        tell(&format!("skipped {}: no result of ycsb or verbs", file.display()));
    }
    write_whole(&args.output, page::page(&inputs).as_bytes())?;
    let results = inputs.files.len();
    Ok(format!("{}: a page of {results} result(s)\n", args.output.display()))
}
