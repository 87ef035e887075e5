//! Resolves flags that belong together, so that each setting is in one field afterwards.

use std::path::Path;

use super::{Command, EngineArgs};
use crate::Program;

impl Command {
    /// Adds the revision to the model's name, and sets the fields for flags that have other programs' names.
    ///
    /// # Errors
    /// Flags that contradict each other.
    pub(super) fn settle(&mut self) -> Result<(), String> {
        let (model, revision) = match self {
            Self::Generate(args) => {
                settle_engine(&mut args.engine);
                (args.model.as_mut(), args.run.revision.take())
            }
            Self::Chat(args) => {
                settle_engine(&mut args.answer.engine);
                (args.answer.model.as_mut(), args.answer.run.revision.take())
            }
            Self::Batch(args) => {
                settle_engine(&mut args.answer.engine);
                (args.answer.model.as_mut(), args.answer.run.revision.take())
            }
            Self::Parity(args) => (Some(&mut args.model), args.run.revision.take()),
            Self::Bench(args) => (args.model.as_mut(), args.run.revision.take()),
            Self::Download(args) => (Some(&mut args.model), args.revision.take()),
            Self::Inspect(args) => (Some(&mut args.model), args.revision.take()),
            _ => return Ok(()),
        };
        let Some(revision) = revision else { return Ok(()) };
        let model = model.ok_or("--revision is of a model on the hub: name one with --model ORG/NAME")?;
        if Path::new(model).exists() {
            return Err(format!("--revision is of a model on the hub, and {model} is on this disk"));
        }
        if model.contains('@') {
            return Err(format!("--revision {revision}: {model} names a revision, too; give one of them"));
        }
        *model = format!("{model}@{revision}");
        Ok(())
    }

    /// Adds the chat template of the program's embedded checkpoint.
    pub(crate) fn complete(&mut self, program: &Program) {
        let Self::Chat(args) = self else { return };
        let Some(chat) = program.embedded.and_then(|embedded| embedded.chat) else { return };
        let answer = &mut args.answer;
        if answer.model.is_some() || answer.chat.chat_template.is_some() {
            return;
        }
        answer.chat.embedded = Some(chat.template);
        if answer.sampling.stop.is_empty() {
            answer.sampling.stop = vec![chat.stop.to_string()];
        }
    }
}

fn settle_engine(engine: &mut EngineArgs) {
    engine.enable_prefix_caching &= !std::mem::take(&mut engine.no_enable_prefix_caching);
}
