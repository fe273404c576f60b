//! `vramctl check`: line by line, what this machine can do and what is missing.
//!
//! Everything that a start could fail on is looked at beforehand, by looking only: no module is
//! loaded, no device is made, nothing is left behind. What cannot be seen without root is said to be
//! unseen, never guessed.

mod kernel;
mod machine;
#[cfg(test)]
mod tests;

use serde::Serialize;
use serde_json::json;
use ublk_vram::Result;
use ublk_vram::safety::Root;

use crate::args::CheckArgs;
use crate::output;

/// Version of the JSON form.
const JSON_VERSION: u32 = 1;

/// How one thing is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    /// As it should be.
    Ok,
    /// Works, but something should be known; or it could not be seen.
    Warn,
    /// No device can be made while it is like this.
    Fail,
}

impl Status {
    fn as_str(self) -> &'static str {
        match self {
            Status::Ok => "ok",
            Status::Warn => "warn",
            Status::Fail => "FAIL",
        }
    }
}

/// One line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Item {
    status: Status,
    item: &'static str,
    detail: String,
    /// What to do about it.
    todo: Option<String>,
}

impl Item {
    fn ok(item: &'static str, detail: impl Into<String>) -> Item {
        Item {
            status: Status::Ok,
            item,
            detail: detail.into(),
            todo: None,
        }
    }

    fn warn(item: &'static str, detail: impl Into<String>, todo: impl Into<String>) -> Item {
        Item {
            status: Status::Warn,
            item,
            detail: detail.into(),
            todo: Some(todo.into()),
        }
    }

    fn fail(item: &'static str, detail: impl Into<String>, todo: impl Into<String>) -> Item {
        Item {
            status: Status::Fail,
            item,
            detail: detail.into(),
            todo: Some(todo.into()),
        }
    }

    /// What only root can see.
    fn unseen(item: &'static str, what: impl std::fmt::Display) -> Item {
        Item::warn(
            item,
            format!("not seen: {what}"),
            "run `vramctl check` as root",
        )
    }
}

/// What is looked at.
struct Machine {
    root: Root,
    /// `uname -r`
    release: String,
    is_root: bool,
}

/// Prints the report; exit status 1 if anything fails.
pub fn run(args: &CheckArgs) -> Result<u8> {
    let release = nix::sys::utsname::uname()
        .map(|names| names.release().to_string_lossy().into_owned())
        .unwrap_or_default();
    let is_root = nix::unistd::geteuid().is_root();
    let machine = Machine {
        root: Root::default(),
        release,
        is_root,
    };
    let items: Vec<Item> = kernel::items(&machine)
        .into_iter()
        .chain(machine::items(&machine))
        .collect();
    let failed = items.iter().any(|item| item.status == Status::Fail);
    if args.json {
        output::json(&json!({ "version": JSON_VERSION, "ok": !failed, "checks": items }))?;
    } else {
        output::data(&render(&items))?;
    }
    Ok(u8::from(failed))
}

fn render(items: &[Item]) -> String {
    let width = items.iter().map(|item| item.item.len()).max().unwrap_or(0);
    items.iter().fold(String::new(), |mut text, item| {
        text.push_str(&format!(
            "{:<4}  {:<width$}  {}\n",
            item.status.as_str(),
            item.item,
            item.detail
        ));
        if let Some(todo) = &item.todo {
            text.push_str(&format!("      -> {todo}\n"));
        }
        text
    })
}
