//! Documents that a command generates from its own command line: the manual page, and completions
//! for shells. `COMMAND --generate KIND` prints one of them, for packages and `make install`. The
//! flag stands alone, so it is no argument of clap, which would also demand a subcommand.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

use crate::command_line::exit_code;

const FLAG: &str = "--generate";
const COMMANDS: [&str; 4] = ["kv-bench", "kv-cli", "kv-resp", "kv-server"];

/// Prints the document that the command line asks for. Returns `None` if it asks for none.
pub fn generate(command: impl FnOnce() -> Command) -> Option<ExitCode> {
    let mut words = std::env::args_os().skip(1);
    if words.next()? != FLAG {
        return None;
    }
    let command = command();
    let name = command.get_name().to_owned();
    let (written, code) = match document(command, words) {
        Ok(document) => (io::stdout().write_all(&document), ExitCode::SUCCESS),
        Err(line) => (writeln!(io::stderr(), "{name}: {line}"), exit_code::USAGE.into()),
    };
    Some(if written.is_ok() { code } else { exit_code::FAILED.into() })
}

/// Returns the document that the words behind the flag name, or the line that says why there is
/// none.
fn document(
    command: Command,
    mut words: impl Iterator<Item = OsString>,
) -> Result<Vec<u8>, String> {
    let kind = words.next().filter(|_| words.next().is_none()).unwrap_or_default();
    let shell = match kind.to_str() {
        Some("man") => return manual(command).map_err(|error| error.to_string()),
        Some("complete-bash") => Shell::Bash,
        Some("complete-fish") => Shell::Fish,
        Some("complete-zsh") => Shell::Zsh,
        _ => return Err(format!("{FLAG} takes man or complete-bash, -fish or -zsh")),
    };
    Ok(completions(command, shell))
}

/// Into memory, because the generator panics if its writer fails.
fn completions(mut command: Command, shell: Shell) -> Vec<u8> {
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut script);
    script
}

/// The manual page of a command: all of its subcommands on one page.
fn manual(command: Command) -> io::Result<Vec<u8>> {
    let name = command.get_name().to_owned();
    let version = command.get_version().unwrap_or_default().to_owned();
    let command = command.subcommand_value_name("command");
    let man = Man::new(command.clone());
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let first_sentence = about.split(". ").next().unwrap_or_default().trim_end_matches('.');
    let (escaped_name, summary) = (escaped(&name), escaped(first_sentence));
    let mut page = Vec::new();
    // Not by `render_title`, which loses the empty date.
    writeln!(page, ".TH {escaped_name} 1 \"\" \"farside {version}\" Farside")?;
    writeln!(page, ".SH NAME\n{escaped_name} \\- {summary}")?;
    page.extend(synopsis(&command)?);
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        writeln!(page, ".SH COMMANDS")?;
        write_subcommands(&mut page, &command, &name)?;
    }
    if let Some(text) = command.get_after_help() {
        // The lines as they are.
        writeln!(page, ".SH EXIT STATUS\n.nf\n{}\n.fi", escaped(&text.to_string()))?;
    }
    let others = COMMANDS.into_iter().filter(|other| *other != name);
    let others: Vec<_> = others.map(|other| format!(".BR {} (1)", escaped(other))).collect();
    writeln!(page, ".SH SEE ALSO\n{}", others.join(",\n"))?;
    Ok(without_repeated_preambles(&page))
}

/// The section SYNOPSIS of a command. The generator leaves out the values of options.
fn synopsis(command: &Command) -> io::Result<Vec<u8>> {
    let mut section = Vec::new();
    Man::new(command.clone()).render_synopsis_section(&mut section)?;
    let mut section = String::from_utf8_lossy(&section).into_owned();
    for option in command.get_opts().filter(|option| option.get_action().takes_values()) {
        let (Some(long), Some(names)) = (option.get_long(), option.get_value_names()) else {
            continue;
        };
        let flag = format!("\\fB{}\\fR", escaped(&format!("--{long}")));
        let names: Vec<_> = names.iter().map(|name| escaped(name)).collect();
        let value = format!("\\fI<{}>\\fR", names.join("> <"));
        let is_optional = option.get_num_args().is_some_and(|values| values.min_values() == 0);
        let value = if is_optional { format!("[{value}]") } else { value };
        section = section.replace(&flag, &format!("{flag} {value}"));
    }
    Ok(section.into_bytes())
}

/// Writes a part for each subcommand, also for those of subcommands.
fn write_subcommands(page: &mut Vec<u8>, command: &Command, path: &str) -> io::Result<()> {
    for subcommand in command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()) {
        let path = format!("{path} {}", subcommand.get_name());
        if subcommand.has_subcommands() {
            write_subcommands(page, subcommand, &path)?;
            continue;
        }
        writeln!(page, ".SS {}", escaped(&path))?;
        // The flag --help of each would only be noise.
        let subcommand = subcommand.clone().disable_help_flag(true).bin_name(path);
        let has_arguments = subcommand.get_arguments().next().is_some();
        let mut sections = synopsis(&subcommand)?;
        let man = Man::new(subcommand);
        sections.extend_from_slice(b".PP\n");
        man.render_description_section(&mut sections)?;
        if has_arguments {
            man.render_options_section(&mut sections)?;
        }
        // Without their headings.
        let lines = sections.split_inclusive(|byte| *byte == b'\n');
        page.extend(lines.filter(|line| !line.starts_with(b".SH ")).flatten());
    }
    Ok(())
}

/// Each section begins with lines that define an apostrophe. Once is enough.
fn without_repeated_preambles(page: &[u8]) -> Vec<u8> {
    let is_preamble = |line: &[u8]| line.starts_with(b".ie ") || line.starts_with(b".el ");
    let mut seen = BTreeSet::new();
    let mut lines: Vec<_> = page.split_inclusive(|byte| *byte == b'\n').collect();
    lines.retain(|line| !is_preamble(line) || seen.insert(*line));
    lines.concat()
}

/// Escapes text for a manual page, in which a backslash, a dash and a dot or an apostrophe at the
/// start of a line mean something else.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    let lines = text.lines().map(|line| match line.starts_with(['.', '\'']) {
        true => format!("\\&{line}"),
        false => line.to_owned(),
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use clap::{Arg, ArgAction};

    use super::*;

    fn command() -> Command {
        let all = Arg::new("all").long("all").action(ArgAction::SetTrue).help("Takes all keys");
        // As clap's derive does.
        let all = all.value_name("ALL");
        let size = Arg::new("size").long("size").value_name("SIZE").num_args(0..=1);
        let ttl = Arg::new("ttl").long("ttl").value_name("TIME");
        let part = Command::new("part").about("Writes a part.").args([all, size, ttl]);
        let group = Command::new("group").subcommand_required(true).subcommand(part);
        let shown = Command::new("get").about("Prints a value").arg(Arg::new("KEY").help("It"));
        let hidden = Command::new("secret").hide(true);
        Command::new("kv-cli")
            .version("1.2")
            .about("Stores keys. Or not.")
            .subcommand_required(true)
            .subcommands([group, shown, hidden])
            .after_help(".codes:\n  0  done")
    }

    fn asked(words: &[&str]) -> Result<String, String> {
        let document = document(command(), words.iter().map(OsString::from));
        document.map(|bytes| String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn a_wrong_kind_is_refused() {
        for words in [&[][..], &["x"], &["man", "x"]] {
            assert!(asked(words).unwrap_err().contains("complete-bash"), "{words:?}");
        }
    }

    #[test]
    fn the_manual_has_all_visible_commands() {
        let page = asked(&["man"]).unwrap();
        for part in [
            ".TH kv\\-cli 1 \"\" \"farside 1.2\" Farside\n",
            "\n.SH NAME\nkv\\-cli \\- Stores keys\n",
            "\n.SS kv\\-cli group part\n",
            "\n\\fBkv\\-cli group part\\fR [\\fB\\-\\-all\\fR] \
             [\\fB\\-\\-size\\fR [\\fI<SIZE>\\fR]] [\\fB\\-\\-ttl\\fR \\fI<TIME>\\fR]",
            "\n.SS kv\\-cli get\n\\fBkv\\-cli get\\fR [\\fIKEY\\fR]",
            "\n.nf\n\\&.codes:\n  0  done\n.fi\n",
            "\n.BR kv\\-bench (1),\n.BR kv\\-resp (1),\n.BR kv\\-server (1)\n",
        ] {
            assert!(page.contains(part), "{part}:\n{page}");
        }
        assert!(!page.contains("secret") && page.matches(".ie ").count() == 1, "{page}");
    }

    #[test]
    fn completions_know_the_commands() {
        for shell in ["bash", "fish", "zsh"] {
            let script = asked(&[&format!("complete-{shell}")]).unwrap();
            assert!(script.contains("kv-cli") && script.contains("part"), "{shell}");
        }
    }
}
