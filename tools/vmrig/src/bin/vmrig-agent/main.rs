//! The guest agent: PID 1 of every machine.
//!
//! It mounts what programs expect, loads the modules it was given, and then does what the host asks
//! over a virtio-serial port. It must go on answering when the guest is out of memory, so it locks
//! its memory, is exempt from the OOM killer, and lives on a ramfs that cannot be swapped; its
//! children get none of that.

mod children;
mod mapping;
mod requests;
mod setup;

use std::{
    fs::File,
    io::{self, BufReader},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use vmrig::protocol::{Reply, Request, read_frame, write_frame};

/// Enough for one request; locked memory is taken for all of it.
const STACK: usize = 256 << 10;

fn main() {
    if std::process::id() != 1 {
        eprintln!("vmrig-agent: this is the first process of a test machine, not a command");
        std::process::exit(2);
    }
    let problems = setup::all();
    if let Err(error) = serve(problems) {
        eprintln!("vmrig-agent: {error}");
    }
    // The end of PID 1 is a kernel panic, with a log that says why.
}

fn serve(problems: Vec<String>) -> io::Result<()> {
    let port = setup::open_port()?;
    let writer = Arc::new(Mutex::new(port.try_clone()?));
    let children = Arc::new(children::Children::start()?);
    answer(
        &writer,
        0,
        Reply::Hello {
            release: setup::release(),
            problems,
        },
        &[],
    );
    let mut reader = BufReader::new(port);
    loop {
        let (head, payload) = match read_frame::<Request>(&mut reader) {
            Ok(frame) => frame,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                // The host closed its end and is about to end the machine.
                thread::sleep(Duration::from_millis(200));
                continue;
            }
            Err(error) => return Err(error),
        };
        let (children, writer) = (children.clone(), writer.clone());
        let request = thread::Builder::new().stack_size(STACK).spawn(move || {
            let (reply, payload) = requests::handle(&children, head.body, &payload);
            answer(&writer, head.id, reply, &payload);
        });
        if let Err(error) = request {
            eprintln!("vmrig-agent: cannot start a thread: {error}");
        }
    }
}

fn answer(writer: &Mutex<File>, id: u64, reply: Reply, payload: &[u8]) {
    let mut writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
    if let Err(error) = write_frame(&mut *writer, id, reply, payload) {
        eprintln!("vmrig-agent: cannot answer request {id}: {error}");
    }
}
