use super::*;
use clap::CommandFactory;

fn parse(text: &str) -> Result<Args, clap::Error> {
    Args::try_parse_from(["vramctl"].into_iter().chain(text.split_whitespace()))
}

fn add(text: &str) -> AddArgs {
    match parse(&format!("add {text}")).unwrap().verb {
        Some(Verb::Add(args)) => *args,
        other => panic!("{other:?}"),
    }
}

#[test]
fn clap_agrees_with_the_table() {
    Args::command().debug_assert();
}

#[test]
fn no_verb_and_every_alias() {
    assert!(parse("").unwrap().verb.is_none());
    for text in ["list", "ls"] {
        assert!(
            matches!(parse(text).unwrap().verb, Some(Verb::List(_))),
            "{text}"
        );
    }
    for text in ["remove x", "del x", "rm x"] {
        assert!(
            matches!(parse(text).unwrap().verb, Some(Verb::Remove(_))),
            "{text}"
        );
    }
    assert!(matches!(
        parse("fault x fail").unwrap().verb,
        Some(Verb::Fault(_))
    ));
    assert!(matches!(
        parse("release x --reverse").unwrap().verb,
        Some(Verb::Release(_))
    ));
    assert!(parse("frobnicate").is_err());
}

#[test]
fn defaults_of_add() {
    let args = add("fast --size 8G");
    assert_eq!(args.size, SizeSpec::Bytes(8 << 30));
    assert_eq!(
        (args.depth, args.queues, args.swap, args.memory.backend),
        (64, None, None, None)
    );
    assert!(!args.allow_unsafe && !args.lab_fault && !args.dry_run);
    assert_eq!(args.depth, ublk_vram::device::DeviceSpec::default_depth());
}

#[test]
fn swap_with_and_without_a_priority() {
    assert_eq!(add("x -s 1G --swap").swap, Some(DEFAULT_SWAP_PRIORITY));
    assert_eq!(add("x -s 1G --swap=7").swap, Some(7));
    assert_eq!(
        add("--swap x -s 1G").swap,
        Some(DEFAULT_SWAP_PRIORITY),
        "takes no name for one"
    );
    assert!(parse("add x -s 1G --swap=32768").is_err());
    assert!(parse("add x -s 1G --swap=-1").is_err());
}

#[test]
fn sizes_that_are_none() {
    for size in ["2Q", "-1", "1e400", "0", "1GG", "101%"] {
        let error = parse(&format!("add x --size {size}")).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{size}");
    }
    assert!(Args::try_parse_from(["vramctl", "add", "x", "--size", ""]).is_err());
    assert!(parse("add x").is_err(), "a size is needed");
}

#[test]
fn names_that_are_none() {
    for name in ["a/b", "..", "ü", "-a", &"x".repeat(33)] {
        assert!(parse(&format!("add {name} --size 1G")).is_err(), "{name}");
        assert!(parse(&format!("show {name}")).is_err(), "{name}");
    }
}

#[test]
fn numbers_out_of_range() {
    for text in [
        "--depth 0",
        "--depth 4097",
        "--queues 0",
        "--bar 6",
        "--timeout 0",
        "--timeout x",
        "--timeout inf",
        "--io-memory 0",
        "--chunk 1.5",
    ] {
        assert!(parse(&format!("add x --size 1G {text}")).is_err(), "{text}");
    }
    assert_eq!(
        add("x -s 1G --timeout 0.5").timeout,
        Some(Duration::from_millis(500))
    );
}

#[test]
fn json_excludes_columns() {
    assert!(parse("list --json -o NAME").is_err());
    match parse("list -n -b -o NAME,SIZE").unwrap().verb {
        Some(Verb::List(args)) => assert_eq!(args.output, ["NAME", "SIZE"]),
        other => panic!("{other:?}"),
    }
}

#[test]
fn offsets_may_be_zero() {
    match parse("fault x hold --reads --from 0 --to 1M --count 2")
        .unwrap()
        .verb
    {
        Some(Verb::Fault(args)) => {
            assert_eq!(
                (args.from, args.to, args.count),
                (0, Some(1 << 20), Some(2))
            );
            assert!(args.reads && args.action == FaultAction::Hold);
        }
        other => panic!("{other:?}"),
    }
    assert!(parse("fault x hold --reads --writes").is_err());
    assert!(parse("fault x explode").is_err());
}
