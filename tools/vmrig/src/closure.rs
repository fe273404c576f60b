//! The shared libraries that a dynamic program needs, found the way the host's loader finds them.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context, Result, bail};

type Closures = HashMap<PathBuf, Arc<Vec<PathBuf>>>;

/// Libraries and loader of `program`, as absolute paths; none for a static program or a script.
pub(crate) fn libraries(program: &Path) -> Result<Arc<Vec<PathBuf>>> {
    static KNOWN: Mutex<Option<Closures>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    if let Some(libraries) = known.get(program) {
        return Ok(libraries.clone());
    }
    let output = Command::new("ldd")
        .arg(program)
        .env("LC_ALL", "C")
        .output()
        .context("cannot run ldd, needed to find shared libraries")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let libraries = parse_ldd(&text)
        .with_context(|| format!("cannot tell the libraries of {}", program.display()))?;
    let libraries = Arc::new(libraries);
    known.insert(program.to_owned(), libraries.clone());
    Ok(libraries)
}

fn parse_ldd(text: &str) -> Result<Vec<PathBuf>> {
    let mut libraries = Vec::new();
    for line in text.lines().map(str::trim) {
        let file = match line.split_once(" => ") {
            Some((name, rest)) if rest.starts_with("not found") => {
                bail!("{name} is not found on this host")
            }
            Some((_, rest)) => rest,
            None => line,
        };
        let file = file.split(" (").next().unwrap_or_default();
        // The vdso has no file; "statically linked" and "not a dynamic executable" are no paths.
        if file.starts_with('/') {
            libraries.push(PathBuf::from(file));
        }
    }
    Ok(libraries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ldd_output_is_read() {
        let text = "\tlinux-vdso.so.1 (0x00007f)\n\
                    \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let expected = [
            "/lib/x86_64-linux-gnu/libc.so.6",
            "/lib64/ld-linux-x86-64.so.2",
        ];
        assert_eq!(parse_ldd(text).unwrap(), expected.map(PathBuf::from));
        assert!(parse_ldd("\tstatically linked\n").unwrap().is_empty());
        assert!(
            parse_ldd("\tnot a dynamic executable\n")
                .unwrap()
                .is_empty()
        );
        let missing = parse_ldd("\tlibx.so.1 => not found\n").unwrap_err();
        assert!(missing.to_string().contains("libx.so.1"));
    }
}
