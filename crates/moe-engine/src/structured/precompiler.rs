//! Compiles grammars ahead of the engine, so that no step waits for a grammar. It first compiles in a separate process.
//! A grammar that takes all memory, time or stack ends only that process and becomes an error.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use crate::error::{Context, Result, failed};

use super::compiler::{SECONDS, Tools, on_stack};
use super::vocabulary::token_bytes;
use super::{Grammar, Grammars, StructuredOutput, StructuredOutputError};
use crate::isolated::{self, Task, Worker};
use crate::tokenizer::Tokenizer;

/// The argument that makes a program a worker. The program then only calls [`serve`].
pub const COMPILE_COMMAND: &str = "compile-grammars";

/// The memory limit covers the vocabulary, the stack and 1 GiB more.
const TASK: Task = Task { command: COMPILE_COMMAND, what: "grammar", memory: 7 << 28, seconds: SECONDS };

/// Compiles grammars for an engine. Each precompiler has a process of its own, which starts when it is first needed.
pub struct Precompiler {
    grammars: Arc<Grammars>,
    tokenizer: Tokenizer,
    program: PathBuf,
    worker: OnceLock<Result<Worker, String>>,
}

/// A compiled grammar. It stays ready while this value lives.
#[derive(Clone)]
pub struct Precompiled(#[expect(dead_code, reason = "it keeps the grammar")] Arc<Grammar>);

impl Precompiler {
    pub(crate) fn new(grammars: Arc<Grammars>, tokenizer: Tokenizer, program: PathBuf) -> Self {
        Self { grammars, tokenizer, program, worker: OnceLock::new() }
    }

    /// Returns the grammar if the engine already has it.
    pub fn known(&self, output: &StructuredOutput) -> Option<Precompiled> {
        self.grammars.known(output).map(Precompiled)
    }

    /// Compiles a grammar for the engine. The call waits until there is room for one more grammar, and until the
    /// grammar is compiled.
    ///
    /// # Errors
    /// The output is not well-formed, uses an unsupported feature, allows no text, or exceeds the limits.
    pub fn compile(&self, output: &StructuredOutput) -> Result<Precompiled, StructuredOutputError> {
        if let Some(known) = self.known(output) {
            return Ok(known);
        }
        self.try_elsewhere(output).map_err(|reason| output.error(reason))?;
        self.grammars.wait_for_room();
        self.grammars.compile(output).map(Precompiled)
    }

    fn try_elsewhere(&self, output: &StructuredOutput) -> Result<(), String> {
        let worker = self.worker.get_or_init(|| {
            let words = token_bytes(&self.tokenizer)?;
            let words = postcard::to_allocvec(&words).map_err(|e| e.to_string())?;
            Ok(Worker::new(self.program.clone(), TASK, words))
        });
        let question = postcard::to_allocvec(output).map_err(|e| e.to_string())?;
        match worker.as_ref().map_err(String::clone)?.ask(question)? {
            Ok(_) => Ok(()),
            Err(reason) => Err(String::from_utf8_lossy(&reason).into_owned()),
        }
    }
}

/// Runs the worker. It reads the vocabulary, and then tries grammars until stdin ends.
///
/// # Errors
/// A pipe breaks, or the worker reads something that is not a question.
pub fn serve() -> Result<()> {
    isolated::serve(TASK, |words| {
        let words: Vec<Vec<u8>> = postcard::from_bytes(&words).context("the vocabulary")?;
        let tools = Arc::new(Tools::new(&words).map_err(|e| failed!("{e}"))?);
        Ok(move |question: Vec<u8>| answer(&tools, &question).map_err(String::into_bytes))
    })
}

fn answer(tools: &Arc<Tools>, question: &[u8]) -> Result<Vec<u8>, String> {
    let output: StructuredOutput = postcard::from_bytes(question).map_err(|e| e.to_string())?;
    let tools = tools.clone();
    let tried = on_stack(move || tools.compile(&output).map(drop))?;
    tried.recv().map_err(|e| e.to_string())?.map(|()| Vec::new())
}
