//! Translates rules to a grammar of llguidance. It leaves out the rules that have no text and the rules that are not
//! used. A text that entered a rule without a text could not end.

use std::collections::HashMap;

use llguidance::api::{GrammarInit, SkipSpec};
use llguidance::derivre::RegexAst;
use llguidance::earley::lexerspec::LexerSpec;
use llguidance::earley::{
    Grammar as Symbols, ParamCond, ParamExpr, ParamRef, ParamValue, SymIdx, SymbolProps,
};

use super::rules::{Grammar, Item, Rule, RuleRef, has_text};

/// The largest number of symbols of a grammar. llguidance numbers symbols with 16 bits, and adds some of its own.
const MOST_SYMBOLS: usize = 50_000;

/// Returns the grammar in the form of llguidance. `skipped` may stand once between two terminals.
///
/// # Errors
/// The grammar has no text, or is too large.
pub(super) fn emit(grammar: &Grammar, skipped: RegexAst) -> Result<GrammarInit, String> {
    let productive = grammar.productive();
    if productive.first() != Some(&true) {
        return Err("it allows no text: what it asks for cannot be satisfied".into());
    }
    let mut emitter = Emitter::new(grammar, &productive, skipped)?;
    emitter.all().map_err(|e| format!("{e:#}"))?;
    Ok(GrammarInit::Internal(emitter.symbols, emitter.lexer))
}

struct Emitter<'g> {
    grammar: &'g Grammar,
    productive: &'g [bool],
    symbols: Symbols,
    lexer: LexerSpec,
    properties: SymbolProps,
    rules: Vec<Option<SymIdx>>,
    terminals: Vec<Option<SymIdx>>,
    tokens: HashMap<u32, SymIdx>,
    /// The rules that have a symbol but are not written yet.
    left: Vec<RuleRef>,
}

impl<'g> Emitter<'g> {
    fn new(grammar: &'g Grammar, productive: &'g [bool], skipped: RegexAst) -> Result<Self, String> {
        let mut lexer = LexerSpec::new().map_err(|e| format!("{e:#}"))?;
        let class =
            lexer.setup_lexeme_class_with_skip(SkipSpec::once(skipped)).map_err(|e| format!("{e:#}"))?;
        Ok(Self {
            grammar,
            productive,
            symbols: Symbols::new(None),
            lexer,
            properties: SymbolProps { grammar_id: class, ..SymbolProps::default() },
            rules: vec![None; grammar.rules.len()],
            terminals: vec![None; grammar.terminals.len()],
            tokens: HashMap::new(),
            left: Vec::new(),
        })
    }

    fn all(&mut self) -> anyhow::Result<()> {
        // No rule may use the start symbol.
        let start =
            self.symbols.fresh_symbol_ext("start", SymbolProps { is_start: true, ..self.properties.clone() });
        let first = self.item(&Item::Rule(RuleRef(0)))?;
        self.symbols.add_rule(start, vec![first])?;
        while let Some(rule) = self.left.pop() {
            let Some(symbol) = self.rules[rule.0] else { continue };
            match &self.grammar.rules[rule.0] {
                Rule::Either(alternatives) => {
                    for items in alternatives {
                        if !items.iter().all(|item| has_text(item, self.productive)) {
                            continue;
                        }
                        let items =
                            items.iter().map(|item| self.item(item)).collect::<anyhow::Result<_>>()?;
                        self.symbols.add_rule(symbol, items)?;
                    }
                }
                Rule::Distinct { items, separator, least, most } => {
                    self.distinct(symbol, items, *separator, *least, *most)?;
                }
            }
        }
        Ok(())
    }

    fn symbol(&mut self, name: &str) -> anyhow::Result<SymIdx> {
        anyhow::ensure!(
            self.symbols.num_symbols() < MOST_SYMBOLS,
            "the schema is too large: its grammar has more than {MOST_SYMBOLS} symbols"
        );
        Ok(self.symbols.fresh_symbol_ext(name, self.properties.clone()))
    }

    fn item(&mut self, item: &Item) -> anyhow::Result<SymIdx> {
        match *item {
            Item::Rule(rule) => {
                if let Some(symbol) = self.rules[rule.0] {
                    return Ok(symbol);
                }
                let symbol = self.symbol("rule")?;
                self.rules[rule.0] = Some(symbol);
                self.left.push(rule);
                Ok(symbol)
            }
            Item::Terminal(terminal) => {
                if let Some(symbol) = self.terminals[terminal] {
                    return Ok(symbol);
                }
                let texts = self.grammar.terminals[terminal].clone();
                let lexeme = self.lexer.add_greedy_lexeme(String::new(), texts, false, None, usize::MAX)?;
                let symbol = self.symbol("terminal")?;
                self.symbols.make_terminal(symbol, lexeme, &self.lexer)?;
                self.terminals[terminal] = Some(symbol);
                Ok(symbol)
            }
            Item::Token(id) => {
                if let Some(symbol) = self.tokens.get(&id) {
                    return Ok(*symbol);
                }
                let lexeme = self.lexer.add_special_token(format!("token {id}"), vec![id..=id])?;
                let symbol = self.symbol("token")?;
                self.symbols.make_terminal(symbol, lexeme, &self.lexer)?;
                self.tokens.insert(id, symbol);
                Ok(symbol)
            }
        }
    }

    /// Returns a symbol whose parameter has one bit for each item that has been used.
    fn distinct(
        &mut self,
        symbol: SymIdx,
        items: &[Item],
        separator: Item,
        least: usize,
        most: usize,
    ) -> anyhow::Result<()> {
        let separator = self.item(&separator)?;
        let more = self.symbol("more")?;
        self.symbols.make_parametric(more)?;
        let all = ParamRef::full();
        self.symbols.add_rule_ext(more, ParamCond::BitCountGE(all, u8::try_from(least)?), Vec::new())?;
        if least == 0 {
            self.symbols.add_rule(symbol, Vec::new())?;
        }
        for (at, item) in items.iter().enumerate().take_while(|_| most > 0) {
            let item = self.item(item)?;
            let bit = ParamValue(1 << at);
            let first = vec![(item, ParamExpr::Null), (more, ParamExpr::Const(bit))];
            self.symbols.add_rule_ext(symbol, ParamCond::True, first)?;
            let new = ParamCond::EQ(ParamRef::single_bit(u8::try_from(at)?), ParamValue(0));
            let few = ParamCond::BitCountLT(all, u8::try_from(most)?);
            let next =
                vec![(separator, ParamExpr::Null), (item, ParamExpr::Null), (more, ParamExpr::BitOr(bit))];
            self.symbols.add_rule_ext(more, ParamCond::And(Box::new(new), Box::new(few)), next)?;
        }
        Ok(())
    }
}
