//! A program that needs more memory than there is, and knows what should be in every byte of it.

use std::io::BufRead;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, bail};

/// Names a file: once it is there, the round that runs is the last.
const STOP_FILE: &str = "HOG_STOP";
const WORDS: usize = 4096 / 8;

/// A page, on a page boundary: what is swapped is what was written as one.
#[repr(C, align(4096))]
#[derive(Clone)]
struct Page([u64; WORDS]);

/// The word at `index` of `page` in `round`: no two pages and no two rounds share one.
pub fn word(round: u32, page: usize, index: usize) -> u64 {
    let seed = (u64::from(round) << 48) ^ ((page as u64) << 12) ^ index as u64;
    // splitmix64's finalizer: neighbouring seeds give unrelated words, so no compression helps.
    let mixed = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

fn fill(memory: &mut [Page], round: u32) {
    for (page, words) in memory.iter_mut().enumerate() {
        for (index, value) in words.0.iter_mut().enumerate() {
            *value = word(round, page, index);
        }
    }
}

fn bad_pages(memory: &[Page], round: u32) -> usize {
    let is_right = |page: usize, words: &Page| {
        words
            .0
            .iter()
            .enumerate()
            .all(|(index, value)| *value == word(round, page, index))
    };
    memory
        .iter()
        .enumerate()
        .filter(|(page, words)| !is_right(*page, words))
        .count()
}

pub fn run(mib: usize, rounds: u32, keep: bool) -> anyhow::Result<()> {
    let start = Instant::now();
    let mut memory = vec![Page([0; WORDS]); mib << 8];
    let (mut bad, mut last) = (0, rounds);
    for round in 1..=rounds {
        fill(&mut memory, round);
        bad += bad_pages(&memory, round);
        // A case that takes as long as it takes says in this way that it is over.
        let is_over = std::env::var_os(STOP_FILE).is_some_and(|path| Path::new(&path).exists());
        if is_over {
            last = round;
        }
        eprintln!(
            "round {round}: {bad} bad pages, {:.1} s",
            start.elapsed().as_secs_f64()
        );
        if is_over {
            break;
        }
    }
    if keep {
        println!("{{\"filled\":{mib}}}");
        std::io::stdin()
            .lock()
            .read_line(&mut String::new())
            .context("waiting to go on")?;
        bad += bad_pages(&memory, last);
    }
    let pages = memory.len();
    println!(
        "{{\"mib\":{mib},\"rounds\":{rounds},\"pages\":{pages},\"bad\":{bad},\"seconds\":{:.1}}}",
        start.elapsed().as_secs_f64()
    );
    if bad > 0 {
        bail!("{bad} of {pages} pages do not hold what was written to them");
    }
    Ok(())
}
