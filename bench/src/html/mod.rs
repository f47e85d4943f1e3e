//! `kv-bench report`: results as one page of HTML that needs nothing else, with charts as SVG.

mod bars;
mod chart;
mod figures;
mod inputs;
mod markup;
mod page;
mod scale;
mod setting;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use clap::ValueHint;

use crate::Result;
use crate::publish::write_whole;

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
/// [`crate::Error::Input`] with the first file that is no result; [`crate::Error::Output`].
pub fn report(args: &Report, tell: impl Fn(&str)) -> Result<String> {
    let inputs = Inputs::read(&args.results)?;
    for file in &inputs.skipped {
        tell(&format!("skipped {}: no result of ycsb or verbs", file.display()));
    }
    write_whole(&args.output, page::page(&inputs).as_bytes())?;
    let results = inputs.count();
    Ok(format!("{}: a page of {results} result(s)\n", args.output.display()))
}
