use super::*;
use clap::CommandFactory;

/// The heading of an argument, wherever a command has it.
fn heading(command: &clap::Command, id: &str) -> Option<String> {
    let argument = command.get_arguments().find(|argument| argument.get_id() == id)?;
    Some(argument.get_help_heading().unwrap_or("Options").to_owned())
}

#[test]
fn the_help_of_every_command_has_each_group_under_its_heading_and_logging_last() {
    let mut cli = Cli::command();
    cli.build();
    let commands = cli.get_subcommands_mut();
    for command in commands.filter(|command| !command.is_hide_set() && command.get_name() != "help") {
        for (id, expected) in [
            ("json", "Options"),
            ("rank", "Options"),
            ("checksums", "Options"),
            ("help", "Options"),
            ("no_release", "Daemons"),
            ("socket_dir", "Daemons"),
            ("health_port", "Health"),
            ("health_host", "Health"),
            ("dtype", "Model"),
            ("tensor_parallel_size", "Parallelism"),
        ] {
            let name = command.get_name();
            assert!(
                heading(command, id).is_none_or(|heading| heading == expected),
                "{name} {id}"
            );
        }
        let help = command.render_help().to_string();
        let (_, logging) = help.split_once("\nLogging:\n").unwrap();
        let flags: Vec<&str> = logging
            .split_whitespace()
            .filter(|word| word.starts_with("--"))
            .collect();
        assert_eq!(flags, ["--log", "--log-format"], "{help}");
    }
}
